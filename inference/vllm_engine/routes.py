"""The routes of docs/contracts.md as vLLM's server mounts them: `inference/api/handlers.py` behind starlette."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from inference.api.handlers import (
    Handlers,
    HttpAnswer,
    check_admin_token,
    error_answer,
    failure_answer,
    health_answer,
    too_large,
)
from inference.vllm_engine.engine import VllmEngine, logger

DISCONNECT_POLL_S = 1.0


def responding(handler: "Callable[[Routes, Request], Awaitable[HttpAnswer]]") -> "Callable[..., Awaitable[Response]]":
    """Turn what a handler returns or raises into a response: an exception would close the keep-alive connection."""

    @functools.wraps(handler)
    async def respond(self: "Routes", request: Request) -> Response:
        try:
            answer = await handler(self, request)
        except ClientDisconnect:
            answer = error_answer(499, "client_closed_request", "the client went away")
        except Exception as error:
            answer = failure_answer(error, f"{request.method} {request.url.path}", logger)
        return Response(answer.body, answer.status, dict(answer.headers), media_type=answer.content_type)

    return respond


class Routes:
    """Handlers over one engine. `engine` is set when vLLM has loaded the model, before it accepts connections."""

    def __init__(self, model_name: str, admin_token: str | None, request_timeout_s: float, max_body_bytes: int) -> None:
        self.engine: VllmEngine | None = None
        self._admin_token = admin_token
        self._model_name = model_name
        self._max_body_bytes = max_body_bytes
        self._handlers = Handlers(lambda: self._engine, request_timeout_s=request_timeout_s, log=logger)

    @property
    def _engine(self) -> VllmEngine:
        assert self.engine is not None, "vLLM calls `init_state` before it serves"
        return self.engine

    @responding
    async def health(self, request: Request) -> HttpAnswer:
        """200 when requests are served, 503 after the engine's death."""
        engine = self._engine
        return health_answer(
            "ok" if engine.is_alive else "dead",
            engine_name="vllm",
            model=self._model_name,
            progress_age_s=time.monotonic() - engine.last_progress,
            waiting_for="new weights" if engine.stats.swapping else "",
            engine=engine,
        )

    @responding
    async def generate(self, request: Request) -> HttpAnswer:
        return await _until_gone(request, self._handlers.generate(await self._body(request)))

    @responding
    async def score(self, request: Request) -> HttpAnswer:
        return await self._handlers.score(await self._body(request))

    @responding
    async def get_weights(self, request: Request) -> HttpAnswer:
        """Version and digest that the workers hold."""
        self._check_token(request)
        return await self._handlers.get_weights()

    @responding
    async def apply_weights(self, request: Request) -> HttpAnswer:
        """Load a publish; the reply is read from the workers after the swap."""
        self._check_token(request)
        return await self._handlers.apply_weights(await self._body(request))

    def _check_token(self, request: Request) -> None:
        check_admin_token(self._admin_token, request.headers.get("Authorization", "").encode("latin-1"))

    async def _body(self, request: Request) -> bytes:
        """The body. Raises `BodyTooLarge` as soon as more than the limit has come."""
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self._max_body_bytes:
                raise too_large(self._max_body_bytes)
            chunks.append(chunk)
        return b"".join(chunks)


async def _until_gone(request: Request, answering: Awaitable[HttpAnswer]) -> HttpAnswer:
    """Wait for the answer as long as the client is there, which starlette does not watch. Cancelling the work frees
    its slot. Raises `ClientDisconnect`."""
    work = asyncio.ensure_future(answering)
    try:
        while not (await asyncio.wait([work], timeout=DISCONNECT_POLL_S))[0]:
            if await request.is_disconnected():
                raise ClientDisconnect
        return work.result()
    finally:
        work.cancel()
