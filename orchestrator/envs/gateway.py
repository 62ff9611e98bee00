"""`Gateway`: the OpenAI-compatible endpoint of one environment, on a free loopback port.

    agent ──▶ verifiers' interception ──X-Session-ID──▶ Gateway ──token ids──▶ Engine
                                                           └── Session: exact tokens, log probabilities, versions

A session id is a trace id: 122 random bits that only this process knows, so it is also the key to the door.
"""

import time
import uuid
from contextlib import AsyncExitStack
from typing import Annotated, Any

import msgspec
from aiohttp import web

from chat.errors import ChatTemplateError, ImageError
from orchestrator.engines.protocol import EngineError
from orchestrator.envs.session import AnySession, ChatTurn
from runtime.process.http_listener import listening

SESSION_HEADER = "X-Session-ID"
MAX_BODY_BYTES = 64 * 2**20
SHUTDOWN_TIMEOUT_S = 1.0


class GatewayChatRequest(msgspec.Struct, frozen=True):
    """The part of a chat completion request that is honoured; sampling is the run's, not the client's."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None

    def refusal(self) -> str | None:
        """What is asked for that the gateway does not do."""
        if self.tools:
            return "tools are not supported by the token gateway"
        if self.stream:
            return "streaming is not supported by the token gateway"
        return "n must be 1" if self.n not in (None, 1) else None


_decoder = msgspec.json.Decoder(GatewayChatRequest)


class Gateway:
    """Serves the sessions that are open. Requests in flight are cancelled when their client goes away."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.sessions: dict[str, AnySession] = {}
        self._listener = AsyncExitStack()
        self._url = ""

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients, known after `start`."""
        return self._url

    def open(self, session_id: str, session: AnySession) -> None:
        """Let `session_id` call from now on."""
        self.sessions[session_id] = session

    def discard(self, session_id: str) -> None:
        """Refuse `session_id` from now on. Idempotent."""
        self.sessions.pop(session_id, None)

    async def start(self) -> None:
        """Bind a free loopback port."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        serving = listening(app, "127.0.0.1", 0, name="gateway", shutdown_timeout_s=SHUTDOWN_TIMEOUT_S)
        self._url = await self._listener.enter_async_context(serving) + "/v1"

    async def close(self) -> None:
        """Release the port. Idempotent."""
        await self._listener.aclose()
        self.sessions.clear()

    async def _models(self, request: web.Request) -> web.Response:
        return _json(200, {"object": "list", "data": [{"id": self._model, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        session = self.sessions.get(request.headers.get(SESSION_HEADER, ""))
        if session is None:
            return _error(401, f"no rollout has the id in {SESSION_HEADER}")
        try:
            chat = _decoder.decode(await request.read())
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            return _error(400, f"not a chat completion request: {error}")
        if (refusal := chat.refusal()) is not None:
            return _error(400, refusal)
        try:
            completion = await session.complete(chat.messages, chat.max_completion_tokens or chat.max_tokens)
        except (ChatTemplateError, ImageError) as error:
            return _error(400, str(error))
        except EngineError as error:
            return _error(502, str(error))
        return _json(200, _chat_completion(self._model, completion))


def _chat_completion(model: str, completion: ChatTurn) -> dict[str, object]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": completion.text},
                "finish_reason": completion.finish_reason,
            }
        ],
        "usage": {
            "prompt_tokens": completion.num_prompt_tokens,
            "completion_tokens": completion.num_sampled_tokens,
            "total_tokens": completion.num_prompt_tokens + completion.num_sampled_tokens,
        },
    }


def _json(status: int, body: dict[str, object]) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json(status, {"error": {"message": message, "type": "gateway_error"}})
