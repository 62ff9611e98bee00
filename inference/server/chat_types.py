"""The part of OpenAI's chat completion request that this server reads."""

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
