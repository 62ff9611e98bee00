"""`Errand`: work in a thread of its own, so that its rank can go on meeting the others until it has ended.

The thread is a daemon: when another rank has failed, nobody waits for it any more.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")

UNDER_WAY, DONE, FAILED = b"?", b"+", b"-"
"""First byte of `Errand.state`."""


class Errand(Generic[_T]):
    """Runs `work` once, from construction on."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work = work
        self._results: list[_T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="errand", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Return when it has ended, or after `timeout_s`."""
        self._thread.join(timeout_s)

    @property
    def state(self) -> bytes:
        """What to tell others: `UNDER_WAY`, `DONE`, or `FAILED` and why."""
        if self._thread.is_alive():
            return UNDER_WAY
        return DONE if self._error is None else FAILED + str(self._error).encode(errors="replace")

    def result(self) -> _T:
        """What the work returned or raised; only after its end."""
        assert not self._thread.is_alive(), "the work goes on"
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # belongs to the thread that asks for the result
            self._error = error
