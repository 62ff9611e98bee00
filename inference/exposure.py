"""The reminder that a server without a token is open to other machines."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from loguru import logger

from inference.config import InferenceConfig

_REMINDER_S = 60.0


@contextmanager
def reminding_of_exposure(config: InferenceConfig) -> Iterator[None]:
    """Log it every minute inside the block, if there is something to log."""
    over = threading.Event()
    if config.is_open_to_others:
        threading.Thread(target=_remind, args=(config.server.host, over), name="exposure", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _remind(host: str, over: threading.Event) -> None:
    while not over.is_set():
        logger.warning(f"{host} is reachable from other machines and has no admin token (server.insecure = true)")
        over.wait(_REMINDER_S)
