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

A `Replica` is one engine of the pool: its state, how busy it is, and the weights that it was seen to serve.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from loguru import logger

from orchestrator.engines.http_client import EngineHealth
from orchestrator.engines.protocol import Availability, EngineError
from transport.backoff import Backoff
from transport.changes import Changes
from transport.wire.generation import (
    AppliedWeights,
    ApplyWeights,
    GenerateReply,
    GenerateRequest,
    ServedWeights,
    UpdateTimes,
)

MAX_FAILURES = 3
"""Requests without an answer, in a row, that take an engine out of service."""
REST = Backoff(0.5, 4.0)
"""How long an engine rests after each failure before that."""


@dataclass(frozen=True, slots=True)
class InService:
    """It gets requests, but few while it rests."""

    num_failures: int = 0
    """Requests that got no answer since the last one that did; fewer than `MAX_FAILURES`."""
    rests_until: float = 0.0
    """Monotonic time until which it rests: requests, retries above all, go to engines that do not, if there are any."""

    def __post_init__(self) -> None:
        assert self.num_failures < MAX_FAILURES, "one failure more, and it is out of service"


@dataclass(frozen=True, slots=True)
class OutOfService:
    """It gets no request before it has been made ready: health, vocabulary and weights are as they should be."""

    reason: str
    """Why it is out of service, and later why it still is."""


@dataclass(frozen=True, slots=True)
class Gone:
    """It has left the run for good. Requests in flight may end."""


EngineState = InService | OutOfService | Gone
"""`EnginePool` draws which follows which."""


def after_failure(state: InService, reason: str, now: float) -> InService | OutOfService:
    """What a request without an answer makes of an engine in service."""
    num_failures = state.num_failures + 1
    if num_failures >= MAX_FAILURES:
        return OutOfService(reason)
    return InService(num_failures, rests_until=now + REST.pause_s(num_failures))


@dataclass(frozen=True, slots=True)
class Target:
    """Weights that an engine should serve."""

    served: ServedWeights
    location: str | None
    """Where they can be loaded from; `None`: they are what the engines were started with."""


class ReplicaClient(Protocol):
    """What the pool needs of one engine. Calls have deadlines; none is retried. Raises `TemporaryError` where the same
    call may succeed later, `EngineError` elsewhere."""

    url: str

    async def sample(self, request: GenerateRequest, timeout_s: float) -> GenerateReply:
        """The engine's reply, as it is: nothing about it has been checked. `InvalidResponse` if it does not decode."""
        ...

    async def apply_weights(self, order: ApplyWeights, digest: str, timeout_s: float) -> ServedWeights:
        """What the engine says it serves after it was told to load a publish, whose digest should be `digest`."""
        ...

    async def served_weights(self, timeout_s: float) -> ServedWeights:
        """What the engine says it serves."""
        ...

    async def health(self) -> EngineHealth:
        """Raises `EngineError`, with what the engine says, while it is not ready."""
        ...


class Replica:
    """An engine. Only `EnginePool` sets its `state`; `seen` is the proof of what it serves, read back from it."""

    def __init__(self, client: ReplicaClient) -> None:
        self.client = client
        self.state: EngineState = InService()
        self.num_in_flight = 0
        self.num_failed_updates = 0
        """Weight updates that failed, since the last one that did not."""
        self.seen: ServedWeights | None = None
        self.vocab_size = 0
        self.last_update: UpdateTimes | None = None
        """How long it took to load what it was brought to last; None if it had that already."""

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def is_in_service(self) -> bool:
        """Whether it may get requests."""
        return isinstance(self.state, InService)

    def rests(self, now: float) -> bool:
        """Whether it failed so short a time ago that another engine is the better choice."""
        return isinstance(self.state, InService) and self.state.rests_until > now

    @property
    def seen_version(self) -> int:
        """The version that was read back last; -1 if none was."""
        return -1 if self.seen is None else self.seen.version

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a request while it is in flight."""
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1

    async def look(self, timeout_s: float) -> ServedWeights:
        """Read back what it serves."""
        self.seen = await self.client.served_weights(timeout_s)
        return self.seen

    async def bring_to(self, target: Target, timeout_s: float) -> None:
        """Have it serve `target` and read it back. It may serve it already. Raises `EngineError`, naming both."""
        expected = target.served
        answered: ServedWeights | None = None
        self.last_update = None
        served = await self.look(timeout_s)
        if served != expected and target.location is not None:
            order = ApplyWeights(location=target.location, version=expected.version)
            answered = await self.client.apply_weights(order, expected.digest, timeout_s)
            if isinstance(answered, AppliedWeights):
                self.last_update = answered.times
                answered = ServedWeights(version=answered.version, digest=answered.digest)
            served = await self.look(timeout_s)
        if served != expected or answered not in (None, expected):
            said = "" if answered is None else f", answered {_name(answered)}"
            raise EngineError(f"{self.url} should serve {_name(expected)}{said}, serves {_name(served)}")


def least_loaded(replicas: Sequence[Replica], now: float) -> Replica:
    """The replica with the least in flight among those that do not rest; among all, if all rest."""
    ready = [replica for replica in replicas if not replica.rests(now)]
    return min(ready or replicas, key=lambda replica: replica.num_in_flight)


def slowest(updates: Iterable[UpdateTimes | None]) -> UpdateTimes | None:
    """The longest time of each phase; None if no engine was updated."""
    known = [times for times in updates if times is not None]
    if not known:
        return None
    return UpdateTimes(
        transfer_s=max(times.transfer_s for times in known),
        pause_s=max(times.pause_s for times in known),
        apply_s=max(times.apply_s for times in known),
    )


def _name(weights: ServedWeights) -> str:
    return f"version {weights.version} ({weights.digest})"


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
