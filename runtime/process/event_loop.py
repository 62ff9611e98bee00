"""How late an event loop runs its callbacks, and which code blocks it."""

import asyncio
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from loguru import logger

PERIOD_S = 0.05
"""Seconds between two looks."""
_FOREIGN = tuple({str(Path(path)) for name, path in sysconfig.get_paths().items() if name.endswith("lib")})


class LoopBlame:
    """Watches the thread that calls `start` until `stop`; `blocked_s` says how long its loop has been blocked.

    A guess, taken by looking at the loop's stack now and then: the innermost function that is neither of the
    standard library nor of an installed package. Where that is not the one to blame, its callers are.
    """

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
        """End the watching thread; may be called again."""
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
    """The innermost function from `frame` outwards that is not of a library; empty if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", *_FOREIGN)):
            return f"{frame.f_code.co_name} ({Path(file).name}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


TICK_S = 0.05
"""Seconds between two probes."""
WINDOW = 200
"""Probes that the percentile looks at: about ten seconds."""
MIN_PROBES = 100
"""Probes before the first warning: imports and start-up block for a moment, and that needs no warning."""
WARN_LAG_S = 0.1
"""99th percentile of lag above which a warning is due."""
WARN_EVERY_S = 60.0
"""Seconds between two warnings."""


class LoopLag:
    """Run `probe()` as a task of the loop to watch; `blocked_s` may be read from any thread.

    `advice` ends the warning: what to do about code that blocks.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, tick_s: float = TICK_S, *, advice: str = ""
    ) -> None:
        self._advice = f"; {advice}" if advice else ""
        self._blame = LoopBlame(lambda: self.blocked_s, WARN_LAG_S / 2)
        self._clock = clock
        self._tick_s = tick_s
        self._lags: deque[float] = deque(maxlen=WINDOW)
        self._last_tick: float | None = None
        self._next_warning = 0.0

    async def probe(self) -> None:
        """Measure until cancelled."""
        self._blame.start()
        try:
            while True:
                self._last_tick = self._clock()
                await asyncio.sleep(self._tick_s)
                self._note(self._clock() - self._last_tick - self._tick_s)
        finally:
            self._last_tick = None
            self._blame.stop()

    @property
    def blocked_s(self) -> float:
        """Seconds that the loop has been blocked for right now; 0 when it turns or is not probed."""
        last_tick = self._last_tick
        return 0.0 if last_tick is None else max(0.0, self._clock() - last_tick - self._tick_s)

    @property
    def p99_s(self) -> float:
        """99th percentile of the lag over the last window, in seconds."""
        lags = sorted(self._lags)
        return lags[int(0.99 * (len(lags) - 1))] if lags else 0.0

    def _note(self, lag: float) -> None:
        self._lags.append(lag)
        now = self._clock()
        is_due = len(self._lags) >= MIN_PROBES and now >= self._next_warning
        if is_due and lag > WARN_LAG_S and self.p99_s > WARN_LAG_S:
            self._next_warning = now + WARN_EVERY_S
            culprit = self._blame.take()
            where = f"{culprit} blocks it" if culprit else "code in it blocks"
            logger.warning(
                f"event loop lags {self.p99_s * 1000:.0f} ms (p99): {where}, or the machine has too few cores"
                f"{self._advice}"
            )
