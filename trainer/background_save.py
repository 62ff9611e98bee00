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

    def join(self) -> None:
        """Wait for the end. `StorageError` if it takes too long: its thread still has the process group, so no other
        save can begin, and the run must end."""
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            raise StorageError(f"checkpoint {self.step} is not written after {JOIN_TIMEOUT_S:g} s more")

    def outcome(self) -> bytes:
        """How it has ended: `OSError` if the disk refused, or whatever else it ran into."""
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
