"""The protocol between the orchestrator and inference engines."""

from collections.abc import Mapping
from typing import Protocol

from orchestrator.engines.availability import Availability
from orchestrator.engines.load import EngineLoad
from transport.wire.generation import GenerateReply, GenerateRequest, ServedWeights, UpdateTimes


class EngineError(Exception):
    """An engine did not answer usefully, after all retries."""


class InvalidResponse(EngineError):
    """An engine answered with something that must not be trained on. Not retried."""


class Generator(Protocol):
    """Whoever samples tokens: an engine of the policy, or a teacher."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample. The reply is validated: lengths agree, log probabilities are finite and <= 0, ids are in the
        vocabulary, version spans cover every token (or none, if no policy of ours sampled them). Raises `EngineError`
        or `InvalidResponse`."""
        ...


class Engine(Generator, Protocol):
    """One engine, or a pool that looks like one. An engine is in service, or it gets no request.

    Invariant of a pool: whoever is in service was seen to serve the version applied last, or a later one.
    """

    @property
    def availability(self) -> Availability:
        """Whether any engine is in service."""
        ...

    async def start(self) -> None:
        """Wait until every engine is healthy. At the deadline, go on with those that are; `EngineError`, naming the
        URLs, if none is."""
        ...

    async def tend(self) -> None:
        """Bring engines that left the service back, with the right weights before the first request; until cancelled.
        Returns at once where nothing can leave."""
        ...

    async def apply_weights(self, manifest_path: str, version: int, digest: str) -> UpdateTimes | None:
        """Have every engine in service load and serve `version`, and read version and digest back. Returns the times
        of the slowest, if any had to load it. Raises `EngineError` that names who does not serve it, and what it
        does."""
        ...

    async def witness(self, request: GenerateRequest) -> Mapping[str, GenerateReply]:
        """What each engine in service answers to `request`, by its URL; without those that do not answer. Empty where
        no model answers."""
        ...

    async def load(self) -> EngineLoad:
        """How busy the engines in service are. Raises `EngineError` if one of them does not say."""
        ...

    async def served(self) -> ServedWeights:
        """What all engines in service serve; raises `EngineError` if they disagree."""
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...
