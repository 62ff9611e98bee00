"""All routes of docs/contracts.md but chat: health, models, generate, score, weights."""

import asyncio
import hmac
import time

from aiohttp import web
from loguru import logger

from inference.api.engine import describe_update, engine_facts, phases_of
from inference.api.generation import Completion, Job, ScoreJob, Scores
from inference.api.requests import APPLY, GENERATE, SCORE, decode_body, job_of, reply_of, score_job_of, score_reply_of
from inference.errors import DeadlineExceeded, InferenceError, WeightsRefused
from inference.server.responses import Handler, error_response, json_response
from inference.server.state import STATE, ServerState
from runtime.health.health import Status
from transport.wire.codec import encode
from transport.wire.generation import MSGPACK, AppliedWeights, ServedWeights


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


async def generate(request: web.Request) -> web.Response:
    """Decode, run, encode. A client that goes away cancels this handler, which frees the slot."""
    state = request.app[STATE]
    asked = decode_body(GENERATE, await request.read())
    completion = await run_job(state, job_of(asked, state.engine.limits))
    return web.Response(body=encode(reply_of(asked, completion)), content_type=MSGPACK)


async def run_job(state: ServerState, job: Job) -> Completion:
    """Run `job` within the server's deadline. Raises `DeadlineExceeded`; the slot is free then."""
    try:
        async with asyncio.timeout(state.request_timeout_s):
            return await state.engine.generate(job)
    except TimeoutError as error:
        raise DeadlineExceeded(f"not finished within {state.request_timeout_s:g} s; the request was dropped") from error


async def score(request: web.Request) -> web.Response:
    """Decode, score, encode."""
    state = request.app[STATE]
    asked = decode_body(SCORE, await request.read())
    scores = await run_score(state, score_job_of(asked, state.engine.limits))
    return web.Response(body=encode(score_reply_of(asked, scores)), content_type=MSGPACK)


async def run_score(state: ServerState, job: ScoreJob) -> Scores:
    """Score `job` within the server's deadline. Raises `DeadlineExceeded`."""
    try:
        async with asyncio.timeout(state.request_timeout_s):
            return await state.engine.score(job)
    except TimeoutError as error:
        raise DeadlineExceeded(f"not scored within {state.request_timeout_s:g} s; the request was dropped") from error


ADMIN_PREFIX = "/inference/admin/"


@web.middleware
async def require_admin_token(request: web.Request, handler: Handler) -> web.StreamResponse:
    """403 without a configured token, 401 without the right one. Compares in constant time."""
    if not request.path.startswith(ADMIN_PREFIX):
        return await handler(request)
    token = request.app[STATE].admin_token
    if token is None:
        return error_response(403, "admin_disabled", "admin routes are off: start the server with admin_token_file")
    given = request.headers.get("Authorization", "").encode(errors="surrogateescape")  # any bytes may come
    if not hmac.compare_digest(given, f"Bearer {token}".encode()):
        return error_response(401, "wrong_admin_token", "the admin token is missing or wrong")
    return await handler(request)


async def get_weights(request: web.Request) -> web.Response:
    """What the engine serves."""
    return json_response(request.app[STATE].engine.served)


async def apply_weights(request: web.Request) -> web.Response:
    """Load a publish; the reply is read from the engine after the swap."""
    state = request.app[STATE]
    asked = decode_body(APPLY, await request.read())
    try:
        served = await state.engine.apply_weights(asked.location, asked.version)
    except InferenceError as error:
        state.metrics.weight_updates.labels("refused" if isinstance(error, WeightsRefused) else "failed").inc()
        logger.warning(f"weights refused, version {state.engine.served.version} stays in service: {error}")
        raise
    state.metrics.weight_updates.labels("applied").inc()
    _log_version(request, served)
    return json_response(AppliedWeights(version=served.version, digest=served.digest, times=state.engine.last_update))


def _log_version(request: web.Request, served: ServedWeights) -> None:
    """One line, and one row of metrics, per policy version."""
    state = request.app[STATE]
    stats = state.engine.stats
    phases = describe_update(state.engine.last_update)
    logger.info(f"serving version {served.version} ({served.digest[:8]}), {stats.running} requests in flight{phases}")
    if state.metric_log is not None:
        state.metric_log.log(
            served.version,
            {
                "running": stats.running,
                "waiting": stats.waiting,
                "decode_steps": stats.decode_steps,
                "sampled_tokens": stats.sampled_tokens,
                "prefilled_tokens": stats.prefilled_tokens,
                **{f"update/{phase}": seconds for phase, seconds in phases_of(state.engine.last_update).items()},
            },
        )
