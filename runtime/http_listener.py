"""`listening`: a bound TCP port that serves an aiohttp application."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from runtime.errors import UserError
from runtime.http_log import http_logger
from transport.security.exposure import netloc, reachable


@asynccontextmanager
async def listening(
    app: web.Application, host: str, port: int, *, name: str, shutdown_timeout_s: float
) -> AsyncIterator[str]:
    """Serve inside the block; yields the base URL. Port 0 takes a free port, a wildcard address is reached through
    loopback. Raises `UserError` when the port is taken.

    A client that goes away cancels its handler: that is what frees the slot of a request nobody waits for.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=http_logger(name),
        shutdown_timeout=shutdown_timeout_s,
    )
    await runner.setup()
    try:
        await _bind(runner, host, port)
        yield reachable(f"http://{netloc(host, runner.addresses[0][1])}")
    finally:
        await runner.cleanup()


async def _bind(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port, backlog=4096).start()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(f"cannot bind {netloc(host, port)}: {reason}; set --server.port") from error
