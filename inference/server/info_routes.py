"""`/health`, `/live`, `/ready`, `/metrics` and `/v1/models`."""

import time

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from inference.engine_facts import engine_facts
from inference.server.errors_json import json_response
from inference.server.state import STATE, ServerState
from runtime.health import Status


async def health(request: web.Request) -> web.Response:
    """200 when requests are served; 503 while loading, when stalled, or after the engine's death."""
    state = request.app[STATE]
    report: dict[str, object] = {
        "status": _status(state),
        "engine": "torch",
        "model": state.model_names[0],
        "progress_age_s": round(state.health.progress_age_s, 3),
        "waiting_for": _waiting_for(state),
    }
    facts = {} if state.loaded is None else engine_facts(state.engine)
    return json_response(report | facts, 200 if report["status"] == "ok" else 503)


async def live(request: web.Request) -> web.Response:
    """503 when a restart would help: the engine is dead, or has stood still for `stall_timeout_s`."""
    state = request.app[STATE]
    is_live = state.health.is_live and (state.loaded is None or state.engine.failure is None)
    return json_response({"status": _status(state)}, 200 if is_live else 503)


async def ready(request: web.Request) -> web.Response:
    """200 when requests are served, 503 otherwise."""
    state = request.app[STATE]
    return json_response({"status": _status(state)}, 200 if _status(state) == "ok" else 503)


async def metrics(request: web.Request) -> web.Response:
    """Prometheus text."""
    body = generate_latest(request.app[STATE].metrics.registry)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


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
    return json_response({"object": "list", "data": [card]})


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
