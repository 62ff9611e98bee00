"""`Changes`: wakes the tasks that wait until something they look at has changed.

    changes = Changes()
    async with asyncio.timeout(10):                          # the waiter: it has a deadline, or shows what it waits for
        await changes.wait_for(lambda: policy.live >= 3)
    policy.live = 3; changes.notify()                        # who makes the change: change first, then notify

For one event loop. `asyncio.Condition` would do the same, but only a coroutine that holds its lock may notify, and here
plain functions do.
"""

import asyncio
from collections.abc import Callable


class Changes:
    """Promise: a waiter that has looked at the state before a `notify` looks again after it. So no change is lost,
    however many waiters there are, and whichever of them are cancelled."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        """Set by the next `notify`, which puts a new one in its place: who waits for that is not woken by this."""

    def notify(self) -> None:
        """Something has changed: every waiter looks again. Never blocks; without waiters it does nothing."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait_for(self, predicate: Callable[[], object]) -> None:
        """Return once `predicate()` is true; it is asked at once, and again after each `notify`."""
        while not predicate():
            await self._next.wait()

    async def wait(self) -> None:
        """Return after the next `notify`. Look at the state immediately before: a change is lost if the task awaits
        anything in between."""
        await self._next.wait()
