"""Polling without blocking the event loop."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Return when `condition()` is true; fail at the deadline."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.002)
