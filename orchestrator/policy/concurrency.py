"""How many rollouts run at a time: a fixed number, or one that follows the load of the engines.

More requests than an engine has places for do not make it faster: they wait inside it, grow older than they need to,
and are lost with it. Fewer leave places empty. So the controller grows the limit while no request waits, and takes back
half of what waits beyond a small reserve, which keeps places filled between two looks.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from loguru import logger

from orchestrator.engines.protocol import EngineError, EngineLoad

PERIOD_S = 2.0
"""Seconds between two looks at the engines: one small request to each, and several looks in the time of a batch."""
RESERVE = 0.1
"""Share of the capacity that may wait."""
GROWTH = 0.1
"""Share of the capacity that is added at a time."""
IN_USE = 0.9
"""Share of the limit that must be in flight before it is worth growing; or so much that no further group fits."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """`lowest <= limit <= highest`. `lowest` is the largest group, which starts as a whole."""

    lowest: int
    highest: int

    def clip(self, limit: int) -> int:
        """The nearest limit that is allowed."""
        return max(self.lowest, min(self.highest, limit))


def next_limit(limit: int, in_flight: int, load: EngineLoad, bounds: Bounds) -> int:
    """The limit to use until the next look."""
    if load.capacity == 0:
        return bounds.clip(limit)
    surplus = load.num_waiting - round(RESERVE * load.capacity)
    if surplus > 0:
        return bounds.clip(min(limit, in_flight) - (surplus + 1) // 2)
    if load.num_waiting == 0 and limit - in_flight < max(bounds.lowest, (1 - IN_USE) * limit):
        return bounds.clip(limit + max(1, round(GROWTH * load.capacity)))
    return bounds.clip(limit)


class ConcurrencyController:
    """Looks every `period_s` and tells `set_limit`. Engines that do not say how busy they are change nothing."""

    def __init__(
        self,
        look: Callable[[], Awaitable[EngineLoad]],
        in_flight: Callable[[], int],
        set_limit: Callable[[int], None],
        bounds: Bounds,
        *,
        period_s: float,
    ) -> None:
        self.limit = bounds.highest
        """Rollouts that may run now."""
        self._look = look
        self._in_flight = in_flight
        self._set_limit = set_limit
        self._bounds = bounds
        self._period_s = period_s

    async def run(self) -> None:
        """Adapt the limit to the load of the engines, until cancelled."""
        while True:
            await self.adjust()
            await asyncio.sleep(self._period_s)

    async def adjust(self) -> None:
        """Look once. An engine that does not answer is the pool's affair: the limit stays."""
        try:
            load = await self._look()
        except EngineError as error:
            logger.debug("the load of the engines is not known: {}", error)
            return
        limit = next_limit(self.limit, self._in_flight(), load, self._bounds)
        if limit != self.limit:
            logger.debug("{} rollouts may run, {} before ({})", limit, self.limit, load)
            self.limit = limit
            self._set_limit(limit)
