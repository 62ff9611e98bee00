"""The routes of docs/contracts.md as vLLM's server mounts them. Same bodies, same errors as `inference/server`."""

import asyncio
import functools
import hmac
import time
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from inference.api.engine import describe_update, engine_facts
from inference.api.requests import APPLY, GENERATE, SCORE, decode_body, job_of, reply_of, score_job_of, score_reply_of
from inference.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    InferenceError,
    QueueFull,
    WeightsRefused,
)
from inference.vllm_engine.engine import VllmEngine, logger
from transport.wire.codec import encode
from transport.wire.generation import MSGPACK, AppliedWeights, GenerateRequest

DISCONNECT_POLL_S = 1.0


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Any msgspec-encodable value."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """The one shape of an error."""
    return json_response({"error": {"message": message, "type": kind}}, status, headers)


def errors_as_json(handler: "Callable[[Routes, Request], Awaitable[Response]]") -> "Callable[..., Awaitable[Response]]":
    """Turn what a handler raises into a JSON error: an exception would close the keep-alive connection."""

    @functools.wraps(handler)
    async def answer(self: "Routes", request: Request) -> Response:
        try:
            return await handler(self, request)
        except InferenceError as error:
            retry = {"Retry-After": "1"} if isinstance(error, QueueFull) else None
            return error_response(error.status, error.kind, str(error), retry)
        except ClientDisconnect:
            return error_response(499, "client_closed_request", "the client went away")
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.url.path)
            return error_response(500, "internal_error", f"internal error: {type(error).__name__}")

    return answer


def needs_token(handler: "Callable[[Routes, Request], Awaitable[Response]]") -> "Callable[..., Awaitable[Response]]":
    """403 without a configured token, 401 without the right one. Compares in constant time."""

    @functools.wraps(handler)
    async def answer(self: "Routes", request: Request) -> Response:
        if self.admin_token is None:
            return error_response(403, "admin_disabled", "admin routes are off: start the server with admin_token_file")
        given = request.headers.get("Authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, f"Bearer {self.admin_token}".encode()):
            return error_response(401, "wrong_admin_token", "the admin token is missing or wrong")
        return await handler(self, request)

    return answer


class Routes:
    """Handlers over one engine. `engine` is set when vLLM has loaded the model, before it accepts connections."""

    def __init__(self, model_name: str, admin_token: str | None, request_timeout_s: float, max_body_bytes: int) -> None:
        self.admin_token = admin_token
        self.engine: VllmEngine | None = None
        self._model_name = model_name
        self._request_timeout_s = request_timeout_s
        self._max_body_bytes = max_body_bytes

    @property
    def _engine(self) -> VllmEngine:
        assert self.engine is not None, "vLLM calls `init_state` before it serves"
        return self.engine

    @errors_as_json
    async def health(self, request: Request) -> Response:
        """200 when requests are served, 503 after the engine's death."""
        engine = self._engine
        report = {
            "status": "ok" if engine.is_alive else "dead",
            "engine": "vllm",
            "model": self._model_name,
            "progress_age_s": round(time.monotonic() - engine.last_progress, 3),
            "waiting_for": "new weights" if engine.stats.swapping else "",
        }
        return json_response(report | engine_facts(engine), 200 if engine.is_alive else 503)

    @errors_as_json
    async def generate(self, request: Request) -> Response:
        """Token in, token out."""
        asked = decode_body(GENERATE, await read_body(request, self._max_body_bytes))
        completion = await self._until_gone(request, asked)
        return Response(completion, media_type=MSGPACK)

    @errors_as_json
    async def score(self, request: Request) -> Response:
        """Log probabilities of given tokens."""
        asked = decode_body(SCORE, await read_body(request, self._max_body_bytes))
        scores = await self._engine.score(score_job_of(asked, self._engine.limits))
        return Response(encode(score_reply_of(asked, scores)), media_type=MSGPACK)

    @errors_as_json
    @needs_token
    async def get_weights(self, request: Request) -> Response:
        """What the workers hold."""
        return json_response(await self._engine.read_served())

    @errors_as_json
    @needs_token
    async def apply_weights(self, request: Request) -> Response:
        """Load a publish; the reply is read from the workers after the swap."""
        asked = decode_body(APPLY, await read_body(request, self._max_body_bytes))
        try:
            served = await self._engine.apply_weights(asked.location, asked.version)
        except WeightsRefused as error:
            logger.warning("weights refused, version %d stays in service: %s", self._engine.served.version, error)
            raise
        times = self._engine.last_update
        logger.info("serving version %d (%s)%s", served.version, served.digest[:8], describe_update(times))
        return json_response(AppliedWeights(version=served.version, digest=served.digest, times=times))

    async def _until_gone(self, request: Request, asked: GenerateRequest) -> bytes:
        """Run within the deadline, as long as the client is there. Cancelling the work frees its slot."""
        work = asyncio.create_task(self._engine.generate(job_of(asked, self._engine.limits)))
        deadline = time.monotonic() + self._request_timeout_s
        try:
            while not (await asyncio.wait([work], timeout=DISCONNECT_POLL_S))[0]:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"not finished within {self._request_timeout_s:g} s; the request was dropped"
                    )
                if await request.is_disconnected():
                    raise ClientDisconnect
            return encode(reply_of(asked, work.result()))
        finally:
            work.cancel()


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body. Raises `BodyTooLarge` when it is larger than `max_bytes`."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise BodyTooLarge(f"the body is larger than {max_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)
