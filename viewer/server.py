"""The live page: an HTTP server that only reads. Files are read in threads, so that one slow disk holds up nobody."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from viewer.access import guard
from viewer.answers import answer
from viewer.assets import assets, content_type
from viewer.errors import NotRecorded, Unreadable, ViewerError
from viewer.run import Run

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
