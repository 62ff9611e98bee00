"""When a request is tried again, and after how long."""

import random

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from orchestrator.engines.protocol import EngineError

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 10.0
MAX_DOUBLINGS = 16
"""Of the first wait: more than it takes to the longest one, and few enough for a float."""


class TemporaryError(EngineError):
    """The same request may succeed later or elsewhere."""

    def __init__(self, message: str, retry_after_s: float | None = None, *, is_busy: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """What the engine asked for, if it did."""
        self.is_busy = is_busy
        """The engine is well and has too much to do: no reason to doubt it."""


def retrying(max_retries: int) -> AsyncRetrying:
    """Try again on `TemporaryError`; raises the last one. One object per call: it holds the call's state."""
    return AsyncRetrying(
        stop=stop_after_attempt(max_retries + 1),
        retry=retry_if_exception_type(TemporaryError),
        wait=_wait_s,
        reraise=True,
    )


def parse_retry_after(value: str | None) -> float | None:
    """Seconds in a `Retry-After` header; its date form is ignored, since clocks differ."""
    try:
        seconds = float(value) if value is not None else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def backoff_s(attempt: int, retry_after_s: float | None, jitter: float) -> float:
    """Seconds before try `attempt + 1`. `jitter` in [0, 1) spreads clients that failed together.

    Never less than the engine asked for, up to `LONGEST_WAIT_S`.
    """
    if retry_after_s is not None:
        return min(retry_after_s + FIRST_WAIT_S * jitter, LONGEST_WAIT_S)
    return min(FIRST_WAIT_S * 2.0 ** min(attempt - 1, MAX_DOUBLINGS), LONGEST_WAIT_S) * (0.5 + jitter)


def _wait_s(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    retry_after_s = error.retry_after_s if isinstance(error, TemporaryError) else None
    return backoff_s(state.attempt_number, retry_after_s, random.random())
