"""`LoopBlame`: which code an event loop was in while it was blocked, seen from another thread.

A guess, taken by looking at the loop's stack now and then: the innermost function that is neither of the standard
library nor of an installed package. Where that is not the one to blame, its callers are.
"""

import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

PERIOD_S = 0.05
"""Seconds between two looks."""
_FOREIGN = tuple({str(Path(path)) for name, path in sysconfig.get_paths().items() if name.endswith("lib")})


class LoopBlame:
    """Watches the thread that calls `start` until `stop`; `blocked_s` says how long its loop has been blocked."""

    def __init__(self, blocked_s: Callable[[], float], longer_than_s: float) -> None:
        self._blocked_s = blocked_s
        self._longer_than_s = longer_than_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.culprit = ""
        """`function (file.py:12)` of the last block that was seen; empty if none was, or nothing of it was known."""

    def start(self) -> None:
        """Begin to watch the calling thread."""
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._watch, args=(threading.get_ident(),), name="loop blame", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Idempotent."""
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None:
            thread.join(timeout=5)

    def take(self) -> str:
        """The culprit, which is forgotten then."""
        culprit, self.culprit = self.culprit, ""
        return culprit

    def _watch(self, thread_id: int) -> None:
        while not self._stop.wait(PERIOD_S):
            if self._blocked_s() > self._longer_than_s:
                self.culprit = blamed(sys._current_frames().get(thread_id)) or self.culprit


def blamed(frame: FrameType | None) -> str:
    """The innermost function from `frame` outwards that is no library's; empty if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", *_FOREIGN)):
            return f"{frame.f_code.co_name} ({Path(file).name}:{frame.f_lineno})"
        frame = frame.f_back
    return ""
