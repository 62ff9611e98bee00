"""Errors as OpenAI-style JSON, and the middleware that makes every failure one."""

import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from loguru import logger

from inference.errors import InferenceError, QueueFull
from inference.server.state import STATE

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Any msgspec-encodable value as a JSON reply."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers)


def error_response(status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    """The one shape of an error: `{"error": {"message", "type"}}`."""
    return json_response({"error": {"message": message, "type": kind}}, status, headers)


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
    except InferenceError as error:
        retry = {"Retry-After": "1"} if isinstance(error, QueueFull) else None
        return error_response(error.status, error.kind, str(error), retry)
    except web.HTTPException as error:
        return error_response(error.status, "http_error", error.reason)
    except Exception as error:  # a bug must not close the connection: the client gets a 500, the log the traceback
        logger.exception(f"{request.method} {request.path} failed")
        return error_response(500, "internal_error", f"internal error: {type(error).__name__}")


def _route_of(request: web.Request) -> str:
    """The route's pattern; unknown paths share one label, so that a scanner cannot fill the registry."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical
