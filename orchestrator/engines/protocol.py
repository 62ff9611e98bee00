"""What the orchestrator asks of models: `Engine`, `Generator`, `ChatModel`; their load, availability, errors."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from transport.wire.generation import GenerateReply, GenerateRequest, ServedWeights, UpdateTimes


class Availability:
    """Open at first. One owner calls `lost` and `restored`; any number of tasks of the same event loop `wait`."""

    def __init__(self, peers: Sequence[str] = ()) -> None:
        self.peers = tuple(peers)
        """URLs of the engines, as the config has them: for `Health.waiting`."""
        self._open = asyncio.Event()
        self._open.set()
        self.reason = ""
        """Why nothing can be generated; empty while something can."""
        self.num_outages = 0
        """Outages that have begun. A task that sees it change knows that one fell into its time."""

    @property
    def is_open(self) -> bool:
        """Whether an engine is in service."""
        return self._open.is_set()

    def lost(self, reason: str) -> None:
        """The last engine has left the service, or another reason has been found why none is back."""
        if self.is_open:
            self.num_outages += 1
        self.reason = reason
        self._open.clear()

    def restored(self) -> None:
        """An engine is in service. Idempotent."""
        self.reason = ""
        self._open.set()

    async def wait(self) -> None:
        """Return once an engine is in service. No deadline: the caller has one, or shows what it waits for."""
        await self._open.wait()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests of everybody who uses the engines, not of this run alone."""

    num_running: int = 0
    num_waiting: int = 0
    """Accepted, but without a place in the batch."""
    capacity: int = 0
    """Places in the batch; 0: not known."""


def total_load(loads: Iterable[EngineLoad]) -> EngineLoad:
    known = list(loads)
    return EngineLoad(
        num_running=sum(load.num_running for load in known),
        num_waiting=sum(load.num_waiting for load in known),
        capacity=sum(load.capacity for load in known),
    )


class EngineError(Exception):
    """An engine did not answer usefully, after all retries."""


class InvalidResponse(EngineError):
    """An engine answered with something that must not be trained on. Not retried."""


class Generator(Protocol):
    """A model that samples tokens: an engine of the policy, or a teacher."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample. The reply is validated: lengths agree, log probabilities are finite and <= 0, ids are in the
        vocabulary, version spans cover every token (or none, if no policy of ours sampled them). Raises `EngineError`
        or `InvalidResponse`."""
        ...


class Engine(Generator, Protocol):
    """One engine, or a pool that looks like one. An engine is in service, or it gets no request.

    Invariant of a pool: every engine in service was seen to serve the version applied last, or a later one.
    """

    @property
    def availability(self) -> Availability:
        """Whether any engine is in service."""
        ...

    async def start(self) -> None:
        """Wait until every engine is healthy. At the deadline, go on with those that are; `EngineError`, naming the
        URLs, if none is."""
        ...

    async def keep_in_service(self) -> None:
        """Bring engines that left the service back, with the right weights before the first request; until cancelled.
        Returns at once where nothing can leave."""
        ...

    async def apply_weights(self, location: str, version: int, digest: str) -> UpdateTimes | None:
        """Have every engine in service load and serve `version`, and read version and digest back. Returns the times
        of the slowest, if any had to load it. Raises `EngineError` that names who does not serve it, and what it
        does."""
        ...

    async def generate_on_each(self, request: GenerateRequest) -> Mapping[str, GenerateReply]:
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


class ChatAsk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for the next turn of a conversation."""

    request_id: str
    messages: tuple[dict[str, Any], ...]
    max_tokens: int
    temperature: float
    seed: int


class ChatReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The assistant's turn, and how long the server says that it was."""

    text: str
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: int
    num_sampled_tokens: int


@runtime_checkable
class ChatModel(Protocol):
    """A model that gets messages and answers in text, without tokens or log probabilities."""

    async def chat(self, ask: ChatAsk) -> ChatReply:
        """The next turn of the assistant. Raises `EngineError` or `InvalidResponse`."""
        ...


Model = Generator | ChatModel
"""What an environment can be played with."""
