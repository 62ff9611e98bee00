"""Answers of the framework-free handlers as aiohttp responses, and the middleware that makes every failure one."""

import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from loguru import logger

from inference.api.handlers import HttpAnswer, error_answer, failure_answer, too_large
from inference.server.state import STATE

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
