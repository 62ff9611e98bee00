"""`Handlers`: the routes of docs/contracts.md that both engines have, without an HTTP framework.

Bodies come in as bytes and leave as an `HttpAnswer`. `inference/server/routes.py` (aiohttp) and
`inference/vllm_engine/routes.py` (vLLM's starlette application) only adapt them, so that status codes, bodies and
error texts are the same on both. A handler raises `InferenceError`; `failure_answer` is the one place that makes an
answer of it.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from inference.api.engine import InferenceEngine, describe_update, engine_facts
from inference.api.generation import Completion, Job
from inference.api.requests import APPLY, GENERATE, SCORE, decode_body, job_of, reply_of, score_job_of, score_reply_of
from inference.errors import (
    AdminDisabled,
    BodyTooLarge,
    DeadlineExceeded,
    InferenceError,
    QueueFull,
    WeightsRefused,
    WrongAdminToken,
)
from transport.wire.codec import encode
from transport.wire.generation import MSGPACK, AppliedWeights

JSON = "application/json"
T = TypeVar("T")
REQUEST_TIMEOUT_S = 1800.0
"""Seconds after which a request is dropped and answered with 504. A backstop against callers that never give up: the
orchestrator's own limit (`engines.request_timeout_s`) is 120 s by default."""


class Log(Protocol):
    """The part of a logger that loguru and vLLM's own have in common. Messages are whole: nothing is filled in."""

    def info(self, message: str, /) -> None:
        """Log `message` for people who watch the service."""
        ...

    def warning(self, message: str, /) -> None:
        """Log `message` as a problem that the service survives."""
        ...

    def exception(self, message: str, /) -> None:
        """Log `message` with the traceback of the exception that is being handled."""
        ...


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What goes back to the client, framework aside."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


def json_answer(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpAnswer:
    """Any msgspec-encodable value as JSON."""
    return HttpAnswer(status, msgspec.json.encode(body), JSON, headers or {})


def error_answer(status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> HttpAnswer:
    """The one shape of an error: `{"error": {"message", "type"}}`."""
    return json_answer({"error": {"message": message, "type": kind}}, status, headers)


def failure_answer(error: Exception, what: str, log: Log) -> HttpAnswer:
    """The answer to a request whose handler raised `error`; call it while `error` is being handled.

    Anything but an `InferenceError` is a bug: the client gets a 500 without details, `log` the traceback."""
    if isinstance(error, InferenceError):
        retry = {"Retry-After": "1"} if isinstance(error, QueueFull) else None
        return error_answer(error.status, error.kind, str(error), retry)
    log.exception(f"{what} failed")
    return error_answer(500, "internal_error", f"internal error: {type(error).__name__}")


def too_large(max_bytes: int) -> BodyTooLarge:
    """The error of a body that is larger than `max_bytes`."""
    return BodyTooLarge(f"the body is larger than {max_bytes} bytes")


def check_admin_token(token: str | None, authorization: bytes) -> None:
    """Compare an `Authorization` header in constant time. Raises `AdminDisabled` or `WrongAdminToken`."""
    if token is None:
        raise AdminDisabled("admin routes are off: start the server with admin_token_file")
    if not hmac.compare_digest(authorization, f"Bearer {token}".encode()):
        raise WrongAdminToken("the admin token is missing or wrong")


def health_answer(
    status: str,
    *,
    engine_name: str,
    model: str,
    progress_age_s: float,
    waiting_for: str,
    engine: InferenceEngine | None,
) -> HttpAnswer:
    """200 for status `ok`, else 503. `engine` is None while the model loads: its facts are left out."""
    report: dict[str, object] = {
        "status": status,
        "engine": engine_name,
        "model": model,
        "progress_age_s": round(progress_age_s, 3),
        "waiting_for": waiting_for,
    }
    facts = {} if engine is None else engine_facts(engine)
    return json_answer(report | facts, 200 if status == "ok" else 503)


class Handlers:
    """Handlers over the engine that `engine` returns, or that raises `Unavailable` while the model loads.

    `count_update` hears of every weight update: `applied`, `refused` or `failed`."""

    def __init__(
        self,
        engine: Callable[[], InferenceEngine],
        *,
        request_timeout_s: float,
        log: Log,
        count_update: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._engine = engine
        self._request_timeout_s = request_timeout_s
        self._log = log
        self._count_update = count_update

    async def generate(self, body: bytes) -> HttpAnswer:
        """`POST /inference/tandem/generate`. Cancelling frees the slot."""
        asked = decode_body(GENERATE, body)
        completion = await self.run_job(job_of(asked, self._engine().limits))
        return HttpAnswer(200, encode(reply_of(asked, completion)), MSGPACK)

    async def score(self, body: bytes) -> HttpAnswer:
        """`POST /inference/tandem/score`."""
        asked = decode_body(SCORE, body)
        engine = self._engine()
        scores = await self._in_time(engine.score(score_job_of(asked, engine.limits)), "scored")
        return HttpAnswer(200, encode(score_reply_of(asked, scores)), MSGPACK)

    async def get_weights(self) -> HttpAnswer:
        """What the engine serves, read from where it computes."""
        return json_answer(await self._engine().read_served())

    async def apply_weights(self, body: bytes) -> HttpAnswer:
        """Load a publish; the reply is read from the engine after the swap."""
        asked = decode_body(APPLY, body)
        engine = self._engine()
        try:
            served = await engine.apply_weights(asked.location, asked.version)
        except InferenceError as error:
            self._count_update("refused" if isinstance(error, WeightsRefused) else "failed")
            self._log.warning(f"weights refused, version {engine.served.version} stays in service: {error}")
            raise
        self._count_update("applied")
        times = engine.last_update
        in_flight = f"{engine.stats.running} requests in flight"
        self._log.info(f"serving version {served.version} ({served.digest[:8]}), {in_flight}{describe_update(times)}")
        return json_answer(AppliedWeights(version=served.version, digest=served.digest, times=times))

    async def run_job(self, job: Job) -> Completion:
        """Run `job` within the server's deadline. Raises `DeadlineExceeded`; the slot is free then."""
        return await self._in_time(self._engine().generate(job), "finished")

    async def _in_time(self, work: Awaitable[T], done: str) -> T:
        try:
            async with asyncio.timeout(self._request_timeout_s):
                return await work
        except TimeoutError as error:
            message = f"not {done} within {self._request_timeout_s:g} s; the request was dropped"
            raise DeadlineExceeded(message) from error
