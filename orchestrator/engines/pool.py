"""`EnginePool`: which engines get requests, who takes the next one, and how an engine comes back.

                  third `failed` in a row, or `leave`
    InService ─────────────────────────────────────────▶ OutOfService ◀── `join`        any ──`drop`──▶ Gone
        ▲                                                     │
        └──────── `keep_in_service`: it was made ready ───────┘

    failed     a request or a weight update got no answer         leave       it is ill, or behind with its weights
    answered   a request got one: failures are counted anew       join, drop  its name has an address more, or less

Example: requests to an engine fail at 0.0 s and 0.2 s. It rests until 0.5 s, then until 1.2 s: others get the requests
if any of them does not rest. The third failure, at 1.3 s, takes it out of service. It is asked at once whether it is
ready, and again after pauses of about 0.2, 0.4, 0.8, ... 10 s. As soon as it is and has the weights, it is in service.

Invariant: `availability` is open exactly while an engine is in service.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence

from loguru import logger

from orchestrator.engines.protocol import Availability, EngineError
from orchestrator.engines.replica import (
    EngineState,
    Gone,
    InService,
    OutOfService,
    Replica,
    after_failure,
    least_loaded,
)
from transport.backoff import Backoff
from transport.changes import Changes

BACKOFF = Backoff(0.2, 10.0, jitter=(0.5, 1.0))
"""Pauses between two tries to bring an engine back; with jitter, since several runs may share it."""

MakeReady = Callable[[Replica], Awaitable[None]]
"""Prove that an engine may serve again. Raises `EngineError` if it may not, or not yet."""


class EnginePool:
    """The engines of a run. States change here only, in `_enter`; calls that fit no arrow of the diagram do nothing."""

    def __init__(self, replicas: Sequence[Replica], availability: Availability) -> None:
        self.replicas = list(replicas)
        self._availability = availability
        self._changes = Changes()
        """An engine has another state, or `replicas` has changed."""

    def in_service(self) -> list[Replica]:
        """Engines that may get requests."""
        return [replica for replica in self.replicas if replica.is_in_service]

    async def pick(self) -> Replica:
        """The engine for the next request. Waits while none is in service: an outage fails no request."""
        while not (candidates := self.in_service()):
            await self._availability.wait()
        return least_loaded(candidates, time.monotonic())

    def answered(self, replica: Replica) -> None:
        """A request was answered. A late answer, to a request of before, brings no engine back."""
        if isinstance(replica.state, InService):
            self._enter(replica, InService())

    def failed(self, replica: Replica, reason: str) -> None:
        """A request to `replica` was not answered."""
        if isinstance(replica.state, InService):
            self._enter(replica, after_failure(replica.state, reason, time.monotonic()))

    def leave(self, replica: Replica, reason: str) -> None:
        """Take `replica` out of service."""
        if isinstance(replica.state, InService):
            self._enter(replica, OutOfService(reason))

    def join(self, replica: Replica) -> None:
        """Add an engine. It gets no request before `keep_in_service` has made it ready."""
        replica.state = OutOfService("it is new, and gets the current weights first")
        self.replicas.append(replica)
        self._changes.notify()
        logger.info("engine {} joins the pool", replica.url)

    def drop(self, replica: Replica) -> None:
        """Remove an engine from the run, for good; requests in flight may end."""
        self.replicas.remove(replica)
        self._enter(replica, Gone())

    async def keep_in_service(self, make_ready: MakeReady) -> None:
        """Bring each engine that is out of service back, as soon as `make_ready` succeeds; until cancelled."""
        keepers: dict[Replica, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                for replica in keepers.keys() - set(self.replicas):
                    keepers.pop(replica).cancel()
                for replica in self.replicas:
                    if replica not in keepers:
                        keepers[replica] = tasks.create_task(self._keep(replica, make_ready))
                await self._changes.wait_for(lambda: keepers.keys() != set(self.replicas))

    async def _keep(self, replica: Replica, make_ready: MakeReady) -> None:
        while True:
            await self._changes.wait_for(lambda: isinstance(replica.state, OutOfService))
            for num_tries in itertools.count(1):
                if await self._bring_back(replica, make_ready):
                    break
                await asyncio.sleep(BACKOFF.pause_s(num_tries))

    async def _bring_back(self, replica: Replica, make_ready: MakeReady) -> bool:
        try:
            await make_ready(replica)
        except EngineError as error:
            if isinstance(replica.state, OutOfService):
                self._enter(replica, OutOfService(str(error)))
            return False
        if isinstance(replica.state, OutOfService):  # it may have been dropped meanwhile
            self._enter(replica, InService())
        return True

    def _enter(self, replica: Replica, state: EngineState) -> None:
        """The one place where an engine of the pool changes its state: log it, and keep the invariant."""
        before, replica.state = replica.state, state
        left = self.in_service()
        match before, state:
            case InService(), OutOfService(reason):
                counts = f"{len(left)} of {len(self.replicas)}"
                logger.warning("engine {} is out of service, {} are left: {}", replica.url, counts, reason)
                if not left:
                    self._availability.lost(reason)
            case OutOfService(), OutOfService(reason):
                if not left:
                    self._availability.lost(reason)
                logger.debug("engine {} stays out of service: {}", replica.url, reason)
            case OutOfService(), InService():
                self._availability.restored()
                logger.info("engine {} is back in service with version {}", replica.url, replica.seen_version)
            case _, Gone():
                logger.warning("engine {} is gone, {} are left in service", replica.url, len(left))
                if not left:
                    self._availability.lost(f"{replica.url} was the last engine in service, and is gone")
            case _:
                return  # in service before and after
        self._changes.notify()
