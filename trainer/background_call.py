"""`BackgroundCall`: work in a thread of its own, so that its rank can train, or meet the others, until it has ended."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


class BackgroundCall(Future[_T]):
    """Runs `work` once, from construction on. Its thread is a daemon: when another rank has failed, nobody waits for it
    any more."""

    def __init__(self, work: Callable[[], _T], name: str) -> None:
        super().__init__()
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    def _run(self, work: Callable[[], _T]) -> None:
        try:
            self.set_result(work())
        except BaseException as error:  # belongs to the thread that asks for the result
            self.set_exception(error)
