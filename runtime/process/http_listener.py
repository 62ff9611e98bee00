"""`listening`: a bound TCP port that serves an aiohttp application, and its logger."""

import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from runtime.errors import UserError
from transport.security.exposure import netloc, reachable

_MAX_PEERS = 1024
_MAX_CHARS = 200


class _OncePerPeer(logging.Filter):
    """A peer's bad HTTP is one line per address, not a traceback each time. Remembers the last `_MAX_PEERS`."""

    def __init__(self) -> None:
        super().__init__()
        self._named: OrderedDict[str, None] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log; a record of bad HTTP is made a single line."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        peer = record.getMessage().rpartition(" ")[2]  # aiohttp: "Error handling request from <address>"
        is_new = peer not in self._named
        self._named[peer] = None
        self._named.move_to_end(peer)
        if len(self._named) > _MAX_PEERS:
            self._named.popitem(last=False)
        what = "".join(char if char.isprintable() else " " for char in str(error))[:_MAX_CHARS]
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg, record.args = "bad HTTP from %s: %s (more of it is not logged)", (peer, " ".join(what.split()))
        record.exc_info = record.exc_text = None
        return is_new


def http_logger(name: str) -> logging.Logger:
    """A logger for `web.AppRunner(logger=...)`; its records go where all records of the standard library go."""
    logger = logging.Logger(name)
    logger.parent = logging.getLogger()
    logger.addFilter(_OncePerPeer())
    return logger


@asynccontextmanager
async def listening(
    app: web.Application, host: str, port: int, *, name: str, shutdown_timeout_s: float
) -> AsyncIterator[str]:
    """Serve inside the block; yields the base URL. Port 0 takes a free port, a wildcard address is reached through
    loopback. Raises `UserError` when the port is taken.

    A client that goes away cancels its handler: that frees the slot of its request.
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
