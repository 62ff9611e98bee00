"""When a request is tried again, and after how long."""

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_before_delay,
    wait_fixed,
    wait_random_exponential,
)

from orchestrator.engines.protocol import EngineError

FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 10.0
POLL_S = 0.2

_T = TypeVar("_T")
_backoff = wait_random_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S)


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
        wait=wait_s,
        reraise=True,
    )


async def when_ready(act: Callable[[], Awaitable[_T]], timeout_s: float, what: str) -> _T:
    """What `act` returns, once it raises no `EngineError` any more; at the deadline an `EngineError` with the last."""
    polling = AsyncRetrying(
        stop=stop_before_delay(timeout_s),
        retry=retry_if_exception_type(EngineError),
        wait=wait_fixed(POLL_S),
        reraise=True,
    )

    async def once() -> _T:  # tenacity awaits only what is declared `async`
        return await act()

    try:
        return await polling(once)
    except EngineError as error:
        raise EngineError(f"{what} is not ready after {timeout_s:g} s: {error}") from error


def parse_retry_after(value: str | None) -> float | None:
    """Seconds in a `Retry-After` header; its date form is ignored, since clocks differ."""
    try:
        seconds = float(value) if value is not None else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def wait_s(state: RetryCallState) -> float:
    """Seconds before the next try, with jitter: clients that failed together are spread. Never less than the engine
    asked for, up to `LONGEST_WAIT_S`."""
    error = state.outcome.exception() if state.outcome is not None else None
    if isinstance(error, TemporaryError) and error.retry_after_s is not None:
        return min(error.retry_after_s + random.uniform(0, FIRST_WAIT_S), LONGEST_WAIT_S)
    return _backoff(state)
