"""What the orchestrator asks of models: `Engine`, `Generator`, `ChatModel`; their load, availability, errors.

`check_reply` refuses replies that must not be trained on.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

from chat.trajectory import Floats
from transport.errors import CodecError
from transport.wire.generation import (
    GenerateReply,
    GenerateRequest,
    ScoreReply,
    ScoreRequest,
    ServedWeights,
    UpdateTimes,
)
from transport.wire.sample import EncodedTensor, VersionSpan


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


LOGPROB_SLACK = 1e-5
"""A float32 log-softmax may round to just above 0."""


def check_reply(request: GenerateRequest, reply: GenerateReply, vocab_size: int) -> GenerateReply:
    """`reply`, if it can be trained on. Raises `InvalidResponse` that says why not, `EngineError` if it was aborted."""
    what = f"reply to {request.request_id}"
    if reply.request_id != request.request_id:
        raise InvalidResponse(f"{what} answers another request, {reply.request_id!r}")
    if reply.finish_reason == "abort":
        raise EngineError(f"{what}: the engine aborted the request")
    num_tokens = _check_vector(what, "token_ids", reply.token_ids, "int32")
    num_logprobs = _check_vector(what, "logprobs", reply.logprobs, "float32")
    if num_tokens != num_logprobs:
        raise InvalidResponse(f"{what} has {num_tokens} tokens but {num_logprobs} log probabilities")
    if not 0 < num_tokens <= request.max_tokens:
        raise InvalidResponse(f"{what} has {num_tokens} tokens, expected 1 to {request.max_tokens}")
    token_ids, logprobs = reply.token_ids.numpy(), reply.logprobs.numpy()
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise InvalidResponse(f"{what} has token ids outside the vocabulary of {vocab_size}")
    if not np.isfinite(logprobs).all() or logprobs.max() > LOGPROB_SLACK:
        raise InvalidResponse(f"{what} has log probabilities that are not finite numbers <= 0")
    _check_spans(what, reply.versions, num_tokens)
    return reply


def _check_vector(what: str, name: str, tensor: EncodedTensor, dtype: str) -> int:
    try:
        tensor.check()
    except CodecError as error:
        raise InvalidResponse(f"{what}: {name}: {error}") from error
    if tensor.dtype != dtype or len(tensor.shape) != 1:
        raise InvalidResponse(f"{what}: {name} must be a {dtype} vector, got {tensor.dtype}{list(tensor.shape)}")
    return tensor.shape[0]


def _check_spans(what: str, spans: tuple[VersionSpan, ...], num_tokens: int) -> None:
    starts = [0, *(span.end for span in spans)]
    in_order = all(
        span.start == start < span.end and span.version >= 0 for span, start in zip(spans, starts, strict=False)
    )
    if not in_order or starts[-1] != num_tokens:
        raise InvalidResponse(f"{what}: version spans do not cover its {num_tokens} tokens in order: {spans}")


def checked_scores(request: ScoreRequest, reply: ScoreReply) -> Floats:
    """The log probabilities in `reply`, if they can be trained on. Raises `InvalidResponse`."""
    what = f"scores of {request.request_id}"
    if reply.request_id != request.request_id:
        raise InvalidResponse(f"{what} answer another request, {reply.request_id!r}")
    try:
        reply.logprobs.check()
    except CodecError as error:
        raise InvalidResponse(f"{what}: {error}") from error
    num_tokens = request.token_ids.shape[0]
    if not reply.logprobs.is_vector("float32", num_tokens):
        got = f"{reply.logprobs.dtype}{list(reply.logprobs.shape)}"
        raise InvalidResponse(f"{what} must be float32[{num_tokens}], got {got}")
    logprobs: Floats = reply.logprobs.numpy()
    if not np.isfinite(logprobs).all() or logprobs.max() > LOGPROB_SLACK:
        raise InvalidResponse(f"{what} are not finite numbers <= 0")
    return logprobs
