"""Stop requests: the first SIGTERM or SIGINT asks for a graceful end, the second ends the process at once."""

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from runtime.errors import ExitCode

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """While the block lasts, a stop signal ends the process at once, with exit code 0: nothing is begun yet.

    For the slow imports of services. A command that is to yield a result must not end with 0 without it.
    """
    previous = {number: signal.signal(number, lambda *_: os._exit(ExitCode.OK)) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Shutdown:
    """Installed in the main thread at construction; works in plain services, and in asyncio ones through `event()`.

    The handler only sets a flag and writes to a pipe. It must not take a lock: it interrupts the main thread anywhere,
    also inside `threading.Event`, where `set()` would wait for itself.
    """

    def __init__(self) -> None:
        self._requested = False
        self._was_signalled = False
        self._leave: Callable[[], None] | None = None
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event: asyncio.Event | None = None
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}

    @property
    def requested(self) -> bool:
        """True from the first signal, or from `request()`, on."""
        return self._requested

    def request(self) -> None:
        """Ask for a graceful end, as the first signal does, which may still come: it is not taken for the second."""
        if not self._requested:
            self._requested = True
            os.write(self._writer, b"x")
            if self._loop is not None and self._event is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the end has begun without being asked for
                    self._loop.call_soon_threadsafe(self._event.set)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a stop is requested or `timeout_s` has passed; true if it is requested. Any thread."""
        return bool(select.select([self._reader], [], [], timeout_s)[0])

    @contextmanager
    def loading(self, leave: Callable[[], None]) -> Iterator[None]:
        """While the block lasts, a stop request ends the process at once with exit code 0, after a call of `leave`.

        For what takes long, cannot be interrupted, and leaves nothing to finish: imports, models, checkpoints.
        """
        self._leave = leave
        try:
            if self._requested:
                self._end()
            yield
        finally:
            self._leave = None

    def event(self) -> asyncio.Event:
        """An event of the running loop that a stop request sets. A blocked loop does not delay the second signal."""
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        if self._requested:
            self._event.set()
        return self._event

    def close(self) -> None:
        """Give the signals back. Idempotent."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous = {}
        self._loop = self._event = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._was_signalled:
            os._exit(128 + number)
        self._was_signalled = True
        self.request()
        if self._leave is not None:
            self._end()

    def _end(self) -> NoReturn:
        if self._leave is not None:
            self._leave()
        os._exit(ExitCode.OK)
