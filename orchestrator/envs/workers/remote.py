"""The model, as an environment in a worker sees it: questions to the orchestrator, over the link."""

import asyncio
import itertools
from collections.abc import Callable

import msgspec

from orchestrator.engines.chat_model import ChatAsk, ChatReply
from orchestrator.engines.protocol import EngineError, InvalidResponse
from orchestrator.envs.workers.frames import FrameLink
from orchestrator.envs.workers.messages import Answer, Ask, AskChat, ChatAnswer, Drop, NoAnswer, ToWorker
from transport.wire.generation import GenerateReply, GenerateRequest


class RemoteDesk:
    """Sends questions and hands out the answers."""

    def __init__(self) -> None:
        self._link: FrameLink[ToWorker] | None = None
        self._waiting: dict[int, asyncio.Future[Answer | ChatAnswer]] = {}
        self._ids = itertools.count()

    def attach(self, link: "FrameLink[ToWorker]") -> None:
        """Ask over `link` from now on."""
        self._link = link

    async def ask(self, question: Callable[[int], msgspec.Struct]) -> Answer | ChatAnswer:
        """The answer to `question(id)`. The rollout's deadline bounds the wait; what nobody waits for is dropped.
        Raises `EngineError`, `InvalidResponse`."""
        if self._link is None:
            raise EngineError("the worker is not connected")
        ask_id = next(self._ids)
        answer: asyncio.Future[Answer | ChatAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[ask_id] = answer
        try:
            self._link.send(question(ask_id))
            return await answer
        finally:
            del self._waiting[ask_id]
            if answer.cancelled():
                self._link.send(Drop(id=ask_id))

    def answered(self, message: Answer | ChatAnswer | NoAnswer) -> None:
        """The orchestrator's answer; one that nobody waits for any more is thrown away."""
        waiting = self._waiting.get(message.id)
        if waiting is None or waiting.done():
            return
        if isinstance(message, NoAnswer):
            waiting.set_exception((InvalidResponse if message.is_invalid else EngineError)(message.reason))
        else:
            waiting.set_result(message)


class RemoteGenerator:
    """Implements `Generator`."""

    def __init__(self, desk: RemoteDesk) -> None:
        self._desk = desk

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """See `Generator`."""
        answer = await self._desk.ask(lambda ask_id: Ask(id=ask_id, request=request))
        assert isinstance(answer, Answer), "the orchestrator answers what it was asked"
        return answer.reply


class RemoteChat:
    """Implements `ChatModel`."""

    def __init__(self, desk: RemoteDesk) -> None:
        self._desk = desk

    async def chat(self, ask: ChatAsk) -> ChatReply:
        """See `ChatModel`."""
        answer = await self._desk.ask(lambda ask_id: AskChat(id=ask_id, request=ask))
        assert isinstance(answer, ChatAnswer), "the orchestrator answers what it was asked"
        return answer.reply
