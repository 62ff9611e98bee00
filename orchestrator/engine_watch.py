"""`EngineWatch`: heartbeats to the engines, so that one that froze is seen long before its requests time out.

It only tells: in the log, in `/health`, and to the ranks that wait. Who gets requests is the pool's decision, which is
made by what becomes of them: an engine that thaws within their deadlines loses none.
"""

import asyncio

from loguru import logger

from orchestrator.engines.protocol import Engine, EngineError
from runtime.health.health import Health

WATCH_S = 1.0
"""Seconds between two questions."""
ANSWER_S = 3.5
"""Seconds that an answer may take. With `WATCH_S` this is below the 5 s within which a frozen peer must be seen."""
LOOP = "engines"


class EngineWatch:
    """Watches `engine`, which must be started, and shows its state in `health`."""

    def __init__(self, engine: Engine, health: Health) -> None:
        self._engine = engine
        self._health = health
        self._problem: str | None = None

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            self._show(await self._ask())
            await asyncio.sleep(WATCH_S)

    async def _ask(self) -> str:
        """What is wrong; empty if all engines in service answered."""
        availability = self._engine.availability
        if not availability.is_open:
            return availability.reason
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._engine.load()
        except TimeoutError:
            return f"no answer within {ANSWER_S:g} s"
        except EngineError as error:
            return str(error)
        return ""

    def _show(self, problem: str) -> None:
        if problem and not self._problem:
            logger.warning("the engines do not answer: {}", problem)
        elif self._problem and not problem:
            logger.info("the engines answer again")
        if problem != self._problem:
            self._problem = problem
            self._health.set_facts(engines=problem or "connected")
            self._health.waiting_for(f"an answer of the engines ({problem})" if problem else "", loop=LOOP)
