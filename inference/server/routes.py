"""All routes of docs/contracts.md but chat, for aiohttp, and what they share: `ServerState`, metrics, errors as JSON.

`inference/api/handlers.py` does what both engines share; here its answers become aiohttp responses.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web
from loguru import logger
from prometheus_client import CollectorRegistry, Counter, Histogram

from inference.api.chat_request import ChatTokenizer
from inference.api.engine import phases_of
from inference.api.handlers import (
    Handlers,
    HttpAnswer,
    check_admin_token,
    error_answer,
    failure_answer,
    health_answer,
    json_answer,
    too_large,
)
from inference.api.requests import MAX_BODY_BYTES
from inference.errors import Unavailable, UnknownModel
from runtime.health.health import Fact, Health, Status
from runtime.metrics.metric_log import MetricLog

if TYPE_CHECKING:
    from inference.torch_engine.engine import TorchEngine

_PREFIX = "tandem_inference_"


class ServerMetrics:
    """Own registry, so that several servers can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(f"{_PREFIX}requests", "Answered requests", ["route", "status"], registry=self.registry)
        self.request_seconds = Histogram(
            f"{_PREFIX}request_seconds",
            "Time to answer",
            ["route"],
            buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300),
            registry=self.registry,
        )
        self.weight_updates = Counter(
            f"{_PREFIX}weight_updates", "Weight updates asked for", ["outcome"], registry=self.registry
        )


@dataclass(slots=True)
class ServerState:
    """`loaded` is None while the model loads."""

    model_names: tuple[str, ...]
    """Names a client may use; the first one is shown."""
    admin_token: str | None
    request_timeout_s: float
    health: Health
    metrics: ServerMetrics
    max_body_bytes: int = MAX_BODY_BYTES
    """Larger requests are answered with 413."""
    metric_log: MetricLog | None = None
    loaded: "tuple[TorchEngine, ChatTokenizer] | None" = None
    handlers: Handlers = field(init=False)

    def __post_init__(self) -> None:
        self.handlers = Handlers(
            lambda: self.engine,
            request_timeout_s=self.request_timeout_s,
            log=logger,
            count_update=lambda outcome: self.metrics.weight_updates.labels(outcome).inc(),
        )

    @property
    def engine(self) -> "TorchEngine":
        """The engine. Raises `Unavailable` while the model loads."""
        if self.loaded is None:
            raise Unavailable("the model is still loading")
        return self.loaded[0]

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer. Raises `Unavailable` while the model loads."""
        if self.loaded is None:
            raise Unavailable("the model is still loading")
        return self.loaded[1]

    def note_progress(self) -> None:
        """The engine calls it, in its own thread, whenever it moves: the health endpoint shows what it does."""
        facts: dict[str, Fact] = {}
        if self.loaded is not None:
            stats = self.engine.stats
            facts = {"version": self.engine.served.version, "running": stats.running, "waiting": stats.waiting}
            facts["sampled_tokens"] = stats.sampled_tokens
        self.health.progress(**facts)

    def check_model(self, name: str | None) -> None:
        """Raise `UnknownModel` if a client names a model that is not served here."""
        if name is not None and name not in self.model_names:
            raise UnknownModel(f"model {name!r} is not served here; this server has {self.model_names[0]!r}")


STATE = web.AppKey("state", ServerState)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def response_of(answer: HttpAnswer) -> web.Response:
    return web.Response(
        body=answer.body, status=answer.status, content_type=answer.content_type, headers=answer.headers or None
    )


async def read_body(request: web.Request) -> bytes:
    """The body. Raises `BodyTooLarge` as soon as more than the limit has come."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large(request.app[STATE].max_body_bytes) from error


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn what a handler raises into a JSON error, and count every answer."""
    started = time.monotonic()
    response = await _answer(request, handler)
    route = _route_of(request)
    metrics = request.app[STATE].metrics
    metrics.requests.labels(route, str(response.status)).inc()
    metrics.request_seconds.labels(route).observe(time.monotonic() - started)
    return response


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return response_of(error_answer(error.status, "http_error", error.reason))
    except Exception as error:  # a bug must not close the connection
        return response_of(failure_answer(error, f"{request.method} {request.path}", logger))


def _route_of(request: web.Request) -> str:
    """The route's pattern; unknown paths share one label, so that a scanner cannot fill the registry."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical


ADMIN_PREFIX = "/inference/admin/"


async def health(request: web.Request) -> web.Response:
    """200 when requests are served; 503 while loading, when stalled, or after the engine's death."""
    state = request.app[STATE]
    return response_of(
        health_answer(
            _status(state),
            engine_name="torch",
            model=state.model_names[0],
            progress_age_s=state.health.progress_age_s,
            waiting_for=_waiting_for(state),
            engine=None if state.loaded is None else state.engine,
        )
    )


async def models(request: web.Request) -> web.Response:
    """The one model, in OpenAI's shape."""
    state = request.app[STATE]
    limits = state.engine.limits
    card = {
        "id": state.model_names[0],
        "object": "model",
        "created": int(time.time()),
        "owned_by": "tandem",
        "max_model_len": limits.max_model_len,
    }
    return response_of(json_answer({"object": "list", "data": [card]}))


async def generate(request: web.Request) -> web.Response:
    """Sample tokens after a prompt of tokens. A client that goes away cancels this handler, which frees the slot."""
    return response_of(await request.app[STATE].handlers.generate(await read_body(request)))


async def score(request: web.Request) -> web.Response:
    return response_of(await request.app[STATE].handlers.score(await read_body(request)))


@web.middleware
async def require_admin_token(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let requests to admin routes through only with the token."""
    if request.path.startswith(ADMIN_PREFIX):
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")  # any bytes may come
        check_admin_token(request.app[STATE].admin_token, given)
    return await handler(request)


async def get_weights(request: web.Request) -> web.Response:
    return response_of(await request.app[STATE].handlers.get_weights())


async def apply_weights(request: web.Request) -> web.Response:
    """Load a publish; the reply is read from the engine after the swap. One row of metrics per policy version."""
    state = request.app[STATE]
    answer = await state.handlers.apply_weights(await read_body(request))
    _log_metrics(state)
    return response_of(answer)


def _log_metrics(state: ServerState) -> None:
    if state.metric_log is None:
        return
    engine = state.engine
    stats = engine.stats
    row = {
        "running": stats.running,
        "waiting": stats.waiting,
        "decode_steps": stats.decode_steps,
        "sampled_tokens": stats.sampled_tokens,
        "prefilled_tokens": stats.prefilled_tokens,
    }
    updates = {f"update/{phase}": seconds for phase, seconds in phases_of(engine.last_update).items()}
    state.metric_log.log(engine.served.version, row | updates)


def _status(state: ServerState) -> str:
    if state.loaded is None:
        return "loading"
    if state.engine.failure is not None:
        return "dead"
    status = state.health.status
    return "ok" if status is Status.OK else status.value


def _waiting_for(state: ServerState) -> str:
    if state.loaded is None:
        return state.health.waits
    return "the decode step before new weights" if state.engine.stats.swapping else state.health.waits
