"""The logger for an aiohttp server: a peer's bad HTTP is one line per address, not a traceback each time."""

import logging
from collections import OrderedDict

from aiohttp.http_exceptions import HttpProcessingError

_MAX_PEERS = 1024
_MAX_CHARS = 200


class _OncePerPeer(logging.Filter):
    """Lets everything pass but bad HTTP from a peer that was named before. Remembers the last `_MAX_PEERS`."""

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
