"""`ChatTeacher`: a frozen model behind any OpenAI-compatible server. It generates (`sft`); it cannot score."""

from orchestrator.algorithms.config import TeacherConfig
from orchestrator.engines.chat_model import ChatAsk, ChatReply
from orchestrator.engines.openai import OpenAIModel
from orchestrator.engines.protocol import EngineError
from orchestrator.tokenizer import Tokenizer
from runtime.errors import PeerLostError


class ChatTeacher:
    """Implements `ChatModel`. What it says is tokenized with the policy's tokenizer."""

    def __init__(self, name: str, config: TeacherConfig, tokenizer: Tokenizer | None = None) -> None:
        self.name = name
        self._model = OpenAIModel(
            (config.url,),
            config.openai,
            request_timeout_s=config.request_timeout_s,
            max_retries=config.max_retries,
            start_timeout_s=config.start_timeout_s,
            tokenizer=tokenizer,
        )

    def __str__(self) -> str:
        return f"teacher {self.name!r}, {self._model}"

    async def start(self) -> None:
        """Wait until it answers. Raises `PeerLostError` at the deadline."""
        try:
            await self._model.start()
        except EngineError as error:
            raise PeerLostError(f"{self} does not answer: {error}") from error

    async def chat(self, ask: ChatAsk) -> ChatReply:
        """See `ChatModel`."""
        return await self._model.chat(ask)

    async def close(self) -> None:
        """Idempotent."""
        await self._model.close()
