"""`Replica`: one engine of a pool: its state, how busy it is, and the weights that it was seen to serve."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from orchestrator.engines.http_client import EngineHealth
from orchestrator.engines.protocol import EngineError
from transport.backoff import Backoff
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
