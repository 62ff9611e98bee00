"""Admin routes: the weights in service. They need the token."""

import hmac

from aiohttp import web
from loguru import logger

from inference.engine import describe_update, phases_of
from inference.errors import InferenceError, WeightsRefused
from inference.requests import APPLY, decode_body
from inference.server.errors_json import Handler, error_response, json_response
from inference.server.state import STATE
from transport.wire.generation import AppliedWeights, ServedWeights

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
        served = await state.engine.apply_weights(asked.manifest_path, asked.version)
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
