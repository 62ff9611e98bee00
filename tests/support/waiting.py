"""Polling with a deadline: no other loop of the tests waits for something to happen."""

import asyncio
import time
from collections.abc import Callable

Condition = Callable[[], object]


def until(condition: Condition, within_s: float = 10.0, describe: Callable[[], str] = str) -> float:
    """Seconds until `condition()` is true. Fails at the deadline, with what `describe()` says then."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within_s, f"not within {within_s:g} s: {condition} {describe()}"
        time.sleep(0.02)
    return time.monotonic() - started


async def until_async(condition: Condition, within_s: float = 10.0) -> None:
    """Return when `condition()` is true; fail at the deadline. Other tasks get a turn before it is asked."""
    started = time.monotonic()
    while True:
        await asyncio.sleep(0.002)
        if condition():
            return
        assert time.monotonic() - started < within_s, f"not within {within_s:g} s: {condition}"
