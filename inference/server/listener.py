"""`HttpListener`: a bound TCP port that serves an application."""

import os
from types import TracebackType

from aiohttp import web

from runtime.errors import UserError
from runtime.http_log import http_logger
from transport.exposure import reachable
from transport.netloc import netloc


class HttpListener:
    """Async context manager. Port 0 takes a free port; see `url`. Raises `UserError` when the port is taken.

    A client that goes away cancels its handler: that is what frees the slot of a request nobody waits for.
    """

    def __init__(self, app: web.Application, host: str, port: int) -> None:
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, logger=http_logger("inference"), shutdown_timeout=5.0
        )
        self._host = host
        self._port = port

    @property
    def url(self) -> str:
        """Base URL. A wildcard address is reached through loopback."""
        return reachable(f"http://{netloc(self._host, self._port)}")

    async def __aenter__(self) -> "HttpListener":
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port, backlog=4096).start()
        except OSError as error:
            await self._runner.cleanup()
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise UserError(f"cannot bind {netloc(self._host, self._port)}: {reason}; set --server.port") from error
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
