"""`Replica`: one engine of a pool: in service or not (`Circuit`), how busy, and the weights it was seen to serve."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from orchestrator.engines.http_client import EngineHealth
from orchestrator.engines.protocol import EngineError
from transport.wire.generation import (
    AppliedWeights,
    ApplyWeights,
    GenerateReply,
    GenerateRequest,
    ServedWeights,
    UpdateTimes,
)

MAX_FAILURES = 3
FIRST_REST_S = 0.5


class Circuit:
    """After a failure that does not open the circuit the engine rests, so that a retry goes elsewhere if it can."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self.num_failures = 0
        """Failures since the last success."""
        self.rests_until = 0.0
        self.reason = ""
        """Why it is open, and later why it still is; empty while it is closed."""

    @property
    def is_open(self) -> bool:
        """Whether the engine is out of service."""
        return self._opened.is_set()

    def succeeded(self) -> None:
        """A request was answered. A late answer to a request of before does not close an open circuit."""
        self.num_failures = 0
        self.rests_until = 0.0

    def failed(self, reason: str, now: float) -> bool:
        """A request was not answered. Whether this is the failure that opened the circuit."""
        # Thousands of requests may fail with their engine: the power must not grow with them.
        self.rests_until = now + FIRST_REST_S * 2 ** min(self.num_failures, MAX_FAILURES)
        self.num_failures += 1
        return self.num_failures >= MAX_FAILURES and self.open(reason)

    def open(self, reason: str) -> bool:
        """Out of service from now on. Whether it was in service."""
        was_closed = not self.is_open
        if was_closed:
            self.reason = reason
        self._opened.set()
        return was_closed

    def close(self) -> None:
        """Back in service."""
        self._opened.clear()
        self.reason = ""
        self.succeeded()

    async def wait_open(self) -> None:
        """Return once it is out of service; it may work for ever."""
        await self._opened.wait()


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
    """In service while its circuit is closed. `seen` is the proof of what it serves: read back from the engine."""

    def __init__(self, client: ReplicaClient) -> None:
        self.client = client
        self.circuit = Circuit()
        self.num_in_flight = 0
        self.num_failed_updates = 0
        """Weight updates that failed, since the last one that did not."""
        self.seen: ServedWeights | None = None
        self.vocab_size = 0
        self.last_update: UpdateTimes | None = None
        """How long it took to load what it was brought to last; None if it had that already."""

    @property
    def url(self) -> str:
        """Its name."""
        return self.client.url

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
    ready = [replica for replica in replicas if replica.circuit.rests_until <= now]
    return min(ready or replicas, key=lambda replica: replica.num_in_flight)


def slowest(updates: Iterable[UpdateTimes | None]) -> UpdateTimes | None:
    """The longest of each phase; None if nobody was updated."""
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
