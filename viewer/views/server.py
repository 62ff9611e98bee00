"""The live page: an HTTP server that only reads, and who may look.

Who may look: a request must name this machine, or bear the token.

Without a token only a loopback address is bound, and only requests to a loopback name are answered: a web site that a
browser has open can point its own name at 127.0.0.1 (DNS rebinding), but not change the name it asks for. With a
token, the first visit brings it in the address; a cookie keeps it, and the address is cleaned.
"""

import asyncio
import hmac
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from transport.security.exposure import is_local, netloc
from viewer.answers.answers import answer
from viewer.errors import NotRecorded, Unreadable, ViewerError
from viewer.index.run import Run
from viewer.views.assets import assets, content_type

COOKIE = "tandem_view"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def guard(token: str | None) -> Middleware:
    """The middleware that every request passes."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if token is None and not _names_this_machine(request.host):
                raise web.HTTPForbidden(text=f"{request.host} is not a name of this machine\n")
            if token is not None and not _bears(request, token):
                raise web.HTTPUnauthorized(text="open the address that `rl view` printed: it has the token\n")
            if token is not None and "token" in request.query:
                raise _remembered(token)
            response = await handler(request)
        except web.HTTPException as refusal:
            refusal.headers.update(HEADERS)
            raise
        response.headers.update(HEADERS)
        return response

    return check


def _names_this_machine(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    return is_local(f"http://{netloc(name, 0)}")


def _bears(request: web.Request, token: str) -> bool:
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    given = (request.query.get("token"), request.cookies.get(COOKIE), bearer if scheme == "Bearer" else None)
    return any(hmac.compare_digest(one.encode(), token.encode()) for one in given if one)


def _remembered(token: str) -> web.HTTPFound:
    found = web.HTTPFound("/")
    found.set_cookie(COOKIE, token, httponly=True, samesite="Strict", path="/")
    return found


RUNS: web.AppKey[Sequence[Run]] = web.AppKey("runs")


def make_app(runs: Sequence[Run], token: str | None = None) -> web.Application:
    """The application for `runs`. With a `token`, every request must bear it."""
    app = web.Application(middlewares=[guard(token)])
    app[RUNS] = runs
    app.router.add_get("/", _index)
    app.router.add_get("/static/{name}", _asset)
    app.router.add_get("/api/runs", _runs)
    app.router.add_get("/api/{run}/{question}", _answer)
    return app


async def serve(app: web.Application, host: str, port: int, ready: Callable[[int], None], stop: asyncio.Event) -> None:
    """Serve until `stop` is set; `ready` is told the port."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        ready(int(runner.addresses[0][1]))
        await stop.wait()
    finally:
        await runner.cleanup()


async def _index(request: web.Request) -> web.Response:
    return _text("index.html")


async def _asset(request: web.Request) -> web.Response:
    return _text(request.match_info["name"])


def _text(name: str) -> web.Response:
    if name not in assets():
        raise web.HTTPNotFound(text="no such file\n")
    return web.Response(text=assets()[name], content_type=content_type(name), charset="utf-8")


async def _runs(request: web.Request) -> web.Response:
    return _json([{"name": run.name} for run in request.app[RUNS]])


async def _answer(request: web.Request) -> web.Response:
    runs = request.app[RUNS]
    name = request.match_info["run"]
    if name not in [str(index) for index in range(len(runs))]:
        raise web.HTTPNotFound(text="no such run\n")
    try:
        found = await asyncio.to_thread(answer, runs[int(name)], request.match_info["question"], dict(request.query))
    except ViewerError as error:
        return _json({"error": str(error)}, status=_status(error))
    return _json(found)


def _status(error: ViewerError) -> int:
    if isinstance(error, Unreadable):
        return 503
    return 404 if isinstance(error, NotRecorded) else 400


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json", status=status)
