"""`EnginePool`: which engines are in service, who takes the next request, and how an engine comes back.

in service ──`failed` three times in a row, or `leave`──▶ out of service ──`tend`: made ready again──▶ in service
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from loguru import logger

from orchestrator.engines.availability import Availability
from orchestrator.engines.protocol import EngineError
from orchestrator.engines.replica import Replica, least_loaded

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
"""Pauses between two tries to bring an engine back; they double."""

MakeReady = Callable[[Replica], Awaitable[None]]
"""Prove that an engine may serve again. Raises `EngineError` if it may not, or not yet."""


class EnginePool:
    """The engines of a run. `availability` follows from who is in service."""

    def __init__(self, replicas: Sequence[Replica], availability: Availability) -> None:
        self.replicas = replicas
        self._availability = availability

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

    async def tend(self, make_ready: MakeReady) -> None:
        """Bring back whoever left, as soon as `make_ready` says so; until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for replica in self.replicas:
                tasks.create_task(self._tend(replica, make_ready))

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
