"""What `/health` and waiting ranks are told about a run: `StatusReporter` (pipeline), `EngineWatch` (engines)."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from loguru import logger

from orchestrator.batches.assembler import BatchAssembler
from orchestrator.engines.protocol import Engine, EngineError
from runtime.health.health import Fact, Health
from transport.server.peers import Peer
from transport.server.server import BatchServer

REPORT_S = 0.5
"""Seconds between two reports: what is seen of a silent trainer is at most this much older than what is known."""


class StatusReporter:
    """Shows the state of the pipeline in `/health`, and tells waiting ranks what the orchestrator waits for."""

    def __init__(
        self,
        server: BatchServer,
        assembler: BatchAssembler,
        health: Health,
        *,
        in_flight: Callable[[], int],
        batch_size: int,
        more_facts: Callable[[], Mapping[str, Fact]] = dict,
    ) -> None:
        self._server = server
        self._assembler = assembler
        self._health = health
        self._in_flight = in_flight
        self._batch_size = batch_size
        self._more_facts = more_facts

    async def run(self) -> None:
        """Report every `REPORT_S` until cancelled."""
        while True:
            self.report()
            await asyncio.sleep(REPORT_S)

    def report(self) -> None:
        """Update `/health` and what waiting ranks are told, once."""
        self._server.waiting_for = self._health.waits
        weights = self._server.weights
        trained = max(self._server.last_trained, 0 if weights is None else weights.version)
        untrained = self._assembler.next_step - 1 - trained
        facts = pipeline_facts(self._in_flight(), self._assembler.pending_rollouts, untrained, self._batch_size)
        facts |= trainer_facts(self._server.peers(), time.monotonic())
        strangers = rejection_facts(self._server.rejections())
        self._health.set_facts(**facts, **strangers, **self._more_facts())


def pipeline_facts(in_flight: int, pending: int, num_untrained: int, batch_size: int) -> dict[str, Fact]:
    """How much work lies between dispatch and the optimizer. A batch is trained once its version is announced.

    `backlog` counts rollouts that run, wait for their batch, or lie in a complete batch that is untrained: admission
    keeps it within `(max_staleness + 1) * batch_size`, plus less than a group per batch.
    """
    return {
        "in_flight": in_flight,
        "queued": pending - in_flight + num_untrained * batch_size,
        "backlog": pending + num_untrained * batch_size,
        "untrained_batches": num_untrained,
    }


def trainer_facts(peers: Sequence[Peer], now: float) -> dict[str, Fact]:
    """Which ranks of the trainer are there, in numbers and in words. `now` is in monotonic seconds."""
    silent = [f"rank {peer.rank} has been silent for {now - peer.last_seen:.0f} s" for peer in peers if not peer.alive]
    words = "; ".join(silent) if silent else "connected" if peers else "no trainer is connected"
    return {"trainer": words, "trainer_ranks": sum(peer.alive for peer in peers), "silent_ranks": len(silent)}


def rejection_facts(counts: Mapping[str, int]) -> dict[str, Fact]:
    """How much the batch server turned away, by reason (`transport.server.router.Reason`)."""
    return {f"rejected_{reason}": count for reason, count in counts.items()}


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
        """Ask every `WATCH_S` until cancelled."""
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
            what, engines = "an answer of the engines" if problem else "", self._engine.availability.peers
            self._health.waiting_for(what, peer=engines, detail=problem, loop=LOOP)
