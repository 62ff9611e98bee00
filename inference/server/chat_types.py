"""The part of OpenAI's chat completion API that this server speaks, as types."""

from typing import Literal

import msgspec


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed reply."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`. Fields that would change the answer and are not served are refused."""

    messages: list[dict[str, object]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Extension: add `prompt_token_ids` to the reply and `token_ids` to each choice."""
    chat_template_kwargs: dict[str, object] | None = None
    """Extension: passed to the chat template."""
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    tools: list[object] | None = None
    response_format: dict[str, object] | None = None


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One of the likeliest tokens at a position."""

    token: str
    token_id: int
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled token."""

    token: str
    token_id: int
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of a choice, one entry per sampled token."""

    content: list[TokenLogprob]


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said."""

    content: str
    role: Literal["assistant"] = "assistant"


class PolicySpan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens `[start, end)` of the choice were sampled by policy `version`."""

    version: int
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | None = None
    weight_versions: list[PolicySpan] | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the reply."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | None = None


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one answer; the last piece has the finish reason."""

    index: int
    delta: ChatMessage | dict[str, str] = {}
    finish_reason: str | None = None
    logprobs: ChoiceLogprobs | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed reply."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
