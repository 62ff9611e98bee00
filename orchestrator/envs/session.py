"""`Session`: the turns of one rollout, from messages to exact tokens; `TextSession`: the same without tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from chat.errors import ImageError
from chat.images.message_parts import image_urls
from chat.images.reader import ReadMessages
from chat.templates import Message
from chat.tokenizer import Tokenizer
from chat.trajectory import Branch, Trajectory
from orchestrator.engines.protocol import ChatAsk, ChatModel, ChatReply, EngineError, InvalidResponse, Model
from transport.wire.generation import GenerateReply, GenerateRequest
from transport.wire.sample import EncodedTensor


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How the turns of one rollout are sampled: turn `k` uses `seed + k`."""

    trajectory_id: str
    seed: int
    temperature: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One turn, as a chat client wants it."""

    text: str
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: int
    num_sampled_tokens: int


class Session:
    """Samples turns and keeps what they were. `failure` is the engine's error, once there was one.

    What a `ChatModel` says is tokenized here: tokens to imitate, not tokens that were sampled."""

    def __init__(self, engine: Model, tokenizer: Tokenizer, plan: SamplingPlan) -> None:
        self.plan = plan
        self.trajectory = Trajectory(tokenizer)
        self.failure: EngineError | None = None
        self.is_truncated = False
        """Whether a completion was cut at its token limit."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._images = tokenizer.images
        self._num_started = 0

    async def complete(self, messages: Sequence[Message], max_tokens: int | None = None) -> ChatTurn:
        """The assistant's next turn, `max_tokens` at most. Raises `EngineError`, `ChatTemplateError`, `ImageError`."""
        seen = await self._read(messages)
        prompt = self.trajectory.prompt(seen.messages, images=seen.images)
        turn = self._num_started
        self._num_started += 1
        request = GenerateRequest(
            request_id=f"{self.plan.trajectory_id}/{turn}",
            token_ids=EncodedTensor.of(prompt.token_ids),
            max_tokens=min(self.plan.max_tokens, max_tokens or self.plan.max_tokens),
            temperature=self.plan.temperature,
            seed=self.plan.seed + turn,
            mm_kwargs={} if prompt.images is None else prompt.images.mm_kwargs,
            mm_token_type_ids=None if prompt.images is None else EncodedTensor.of(prompt.token_types),
        )
        try:
            reply = await self._sample(request, messages)
            self._check_sampled(reply)
        except EngineError as error:
            self.failure = error
            raise
        text = self.trajectory.record(prompt, reply)
        self.is_truncated |= reply.finish_reason == "length"
        finish_reason: Literal["stop", "length"] = "length" if reply.finish_reason == "length" else "stop"
        return ChatTurn(text, finish_reason, len(prompt.token_ids), reply.token_ids.shape[0])

    async def _sample(self, request: GenerateRequest, messages: Sequence[Message]) -> GenerateReply:
        if not isinstance(self._engine, ChatModel):
            return await self._engine.generate(request)
        answer = await self._engine.chat(
            _ask(request.request_id, messages, self.plan, request.max_tokens, request.seed)
        )
        return tokenized(request, answer, self._tokenizer)

    async def _read(self, messages: Sequence[Message]) -> ReadMessages:
        """The images of `messages`. Raises `ImageError`; a model of text must get none."""
        if self._images is not None:
            return await self._images.read(messages)
        if any(True for _ in image_urls(messages)):
            raise ImageError(
                "the messages have an image, and the model does not see any: model.path has no image processor"
            )
        return ReadMessages(messages, {})

    def _check_sampled(self, reply: GenerateReply) -> None:
        """A sampled placeholder has no image: in later turns, and in training, it would take another one's place."""
        sampled = None if self._images is None else self._images.placeholders.sampled(reply.token_ids.numpy())
        if sampled is not None:
            raise InvalidResponse(
                f"reply to {reply.request_id}: the policy sampled {sampled!r}, which stands for media"
            )


class TextSession:
    """The turns of a rollout by a `ChatModel` without a tokenizer: text, and lengths as the server counts them."""

    def __init__(self, model: ChatModel, plan: SamplingPlan) -> None:
        self.plan = plan
        self.trajectory = TextTrajectory()
        self.failure: EngineError | None = None
        self.is_truncated = False
        self._model = model
        self._num_started = 0

    async def complete(self, messages: Sequence[Message], max_tokens: int | None = None) -> ChatTurn:
        turn = self._num_started
        self._num_started += 1
        limit = min(self.plan.max_tokens, max_tokens or self.plan.max_tokens)
        request_id = f"{self.plan.trajectory_id}/{turn}"
        try:
            reply = await self._model.chat(_ask(request_id, messages, self.plan, limit, self.plan.seed + turn))
        except EngineError as error:
            self.failure = error
            raise
        self.trajectory.record(messages, reply)
        self.is_truncated |= reply.finish_reason == "length"
        return ChatTurn(reply.text, reply.finish_reason, reply.num_prompt_tokens, reply.num_sampled_tokens)


class TextTrajectory:
    """Turns without tokens. Each becomes a branch whose ids are -1: only its lengths mean anything."""

    def __init__(self) -> None:
        self.messages: tuple[Message, ...] = ()
        """The conversation that the newest turn ended with."""
        self._branches: list[Branch] = []

    def record(self, messages: Sequence[Message], reply: ChatReply) -> None:
        self.messages = (*messages, {"role": "assistant", "content": reply.text})
        num_tokens = reply.num_prompt_tokens + reply.num_sampled_tokens
        self._branches.append(
            Branch(
                token_ids=np.full(num_tokens, -1, np.int32),
                sampled=np.arange(num_tokens) >= reply.num_prompt_tokens,
                logprobs=np.zeros(num_tokens, np.float32),
                versions=(),
            )
        )

    def branches(self) -> tuple[Branch, ...]:
        return tuple(self._branches)


AnySession = Session | TextSession


def open_session(model: Model, tokenizer: Tokenizer | None, plan: SamplingPlan) -> AnySession:
    """A session of tokens where there is a tokenizer, else one of text."""
    if tokenizer is not None:
        return Session(model, tokenizer, plan)
    assert isinstance(model, ChatModel), "only a `ChatModel` can be used without a tokenizer"
    return TextSession(model, plan)


def tokenized(request: GenerateRequest, answer: ChatReply, tokenizer: Tokenizer) -> GenerateReply:
    """The answer as if its text had been sampled: log probabilities are 0, and no version of ours made it."""
    token_ids = tokenizer.encode(answer.text)
    if answer.finish_reason == "stop":
        token_ids = np.append(token_ids, np.int32(min(tokenizer.eos_ids)))
    is_cut = answer.finish_reason == "length" or len(token_ids) > request.max_tokens
    token_ids = token_ids[: request.max_tokens].astype(np.int32)
    if not len(token_ids):
        raise EngineError(f"reply to {request.request_id} is empty")
    return GenerateReply(
        request_id=request.request_id,
        token_ids=EncodedTensor.of(token_ids),
        logprobs=EncodedTensor.of(np.zeros(len(token_ids), np.float32)),
        finish_reason="length" if is_cut else "stop",
        versions=(),
    )


def _ask(request_id: str, messages: Sequence[Message], plan: SamplingPlan, limit: int, seed: int | None) -> ChatAsk:
    return ChatAsk(
        request_id=request_id,
        messages=tuple(dict(message) for message in messages),
        max_tokens=limit,
        temperature=plan.temperature,
        seed=seed or 0,
    )
