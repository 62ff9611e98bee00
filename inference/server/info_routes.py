"""`/health` and `/v1/models`."""

import time

from aiohttp import web

from inference.engine import engine_facts
from inference.server.errors_json import json_response
from inference.server.state import STATE, ServerState
from runtime.health.health import Status


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
