"""Waiting for what another task does."""

import asyncio
import time
from collections.abc import Callable


async def until(holds: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Return as soon as `holds()` is true; fail the test at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"still not true after {timeout_s:g} s"
        await asyncio.sleep(0.001)
