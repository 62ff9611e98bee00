"""`EnginePool`: which engines are in service, who takes the next request, and how an engine comes back.

in service ──`failed` three times in a row, or `leave`──▶ out of service ──`tend`: made ready again──▶ in service
`join` ──▶ out of service                                 any ──`drop`──▶ gone, when its requests have ended
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from loguru import logger

from orchestrator.engines.protocol import Availability, EngineError
from orchestrator.engines.replica import Replica, least_loaded

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
"""Pauses between two tries to bring an engine back; they double."""

MakeReady = Callable[[Replica], Awaitable[None]]
"""Prove that an engine may serve again. Raises `EngineError` if it may not, or not yet."""


class EnginePool:
    """The engines of a run. `availability` follows from who is in service."""

    def __init__(self, replicas: Sequence[Replica], availability: Availability) -> None:
        self.replicas = list(replicas)
        self._availability = availability
        self._changed = asyncio.Event()

    def in_service(self) -> list[Replica]:
        """Engines that may get requests."""
        return [replica for replica in self.replicas if not replica.circuit.is_open]

    async def pick(self) -> Replica:
        """Who takes the next request. Waits while no engine is in service: the outage is no request's fault."""
        while not (candidates := self.in_service()):
            await self._availability.wait()
        return least_loaded(candidates, time.monotonic())

    def failed(self, replica: Replica, reason: str) -> None:
        """A request to `replica` was not answered."""
        if replica.circuit.failed(reason, time.monotonic()):
            self._has_left(replica)

    def leave(self, replica: Replica, reason: str) -> None:
        """Take `replica` out of service. Idempotent."""
        if replica.circuit.open(reason):
            self._has_left(replica)

    def join(self, replica: Replica) -> None:
        """A new engine. It gets no request before `tend` has made it ready."""
        replica.circuit.open("it is new, and gets the current weights first")
        self.replicas.append(replica)
        self._changed.set()
        logger.info("engine {} joins the pool", replica.url)

    def drop(self, replica: Replica) -> None:
        """An engine that is no part of the run any more; requests in flight may end."""
        self.replicas.remove(replica)
        self._changed.set()
        logger.warning("engine {} is gone, {} are left in service", replica.url, len(self.in_service()))
        if not self.in_service():
            self._availability.lost(f"{replica.url} was the last engine in service, and is gone")

    async def tend(self, make_ready: MakeReady) -> None:
        """Bring back whoever left, as soon as `make_ready` says so; until cancelled."""
        tended: dict[Replica, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                for replica in [one for one in tended if one not in self.replicas]:
                    tended.pop(replica).cancel()
                for replica in self.replicas:
                    if replica not in tended:
                        tended[replica] = tasks.create_task(self._tend(replica, make_ready))
                self._changed.clear()
                await self._changed.wait()

    async def _tend(self, replica: Replica, make_ready: MakeReady) -> None:
        while True:
            await replica.circuit.wait_open()
            pause_s = FIRST_PAUSE_S
            while not await self._bring_back(replica, make_ready):
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # jitter: several runs may share an engine
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _bring_back(self, replica: Replica, make_ready: MakeReady) -> bool:
        try:
            await make_ready(replica)
        except EngineError as error:
            replica.circuit.reason = str(error)
            if not self._availability.is_open:
                self._availability.lost(str(error))
            logger.debug("engine {} stays out of service: {}", replica.url, error)
            return False
        replica.circuit.close()
        if self.in_service():  # it may have been dropped meanwhile, and `pick` relies on there being one
            self._availability.restored()
        logger.info("engine {} is back in service with version {}", replica.url, replica.seen_version)
        return True

    def _has_left(self, replica: Replica) -> None:
        num_left, reason = len(self.in_service()), replica.circuit.reason
        logger.warning(
            "engine {} is out of service, {} of {} are left: {}", replica.url, num_left, len(self.replicas), reason
        )
        if num_left == 0:
            self._availability.lost(reason)
