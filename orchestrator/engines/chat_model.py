"""`ChatModel`: a model that takes messages and gives text, and keeps its tokens to itself. It cannot be trained."""

from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from orchestrator.engines.protocol import Generator


class ChatAsk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Continue this conversation."""

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
    """Whoever answers conversations."""

    async def chat(self, ask: ChatAsk) -> ChatReply:
        """The next turn of the assistant. Raises `EngineError` or `InvalidResponse`."""
        ...


Model = Generator | ChatModel
"""What an environment can be played with."""
