"""All routes of docs/contracts.md but chat, for aiohttp: `inference/api/handlers.py` does what both engines share."""

import time

from aiohttp import web

from inference.api.engine import phases_of
from inference.api.handlers import check_admin_token, health_answer, json_answer
from inference.server.responses import Handler, read_body, response_of
from inference.server.state import STATE, ServerState
from runtime.health.health import Status

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
