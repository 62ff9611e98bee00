"""`BackgroundSave`: the slow part of a checkpoint, in a thread, while training goes on.

The state was copied before it starts, so that training may change it. The thread talks to the threads of the other
ranks over a process group of its own: collectives of two threads on one group would mix.
"""

import threading
from collections.abc import Callable

from runtime.errors import StorageError

JOIN_TIMEOUT_S = 600.0
"""Seconds that a save may still take when it is waited for."""


class BackgroundSave:
    """Runs `work` once, from construction on."""

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        self.step = step
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {step}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def finish(self) -> bytes:
        """Wait for the end; raises `OSError` if it failed or takes too long, whatever else it ran into."""
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"checkpoint {self.step} is not written after {JOIN_TIMEOUT_S:g} s more")
        if isinstance(self._error, StorageError):
            raise OSError(str(self._error)) from self._error
        if self._error is not None:
            raise self._error
        return b""

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # belongs to the training thread, which asks for it
            self._error = error
