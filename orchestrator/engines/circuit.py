"""`Circuit`: whether an engine is in service, decided by what became of the requests sent to it.

    closed ──`MAX_FAILURES` in a row, or `open`──▶ open ──`close`: it serves the right weights again──▶ closed

Time does not close it: an engine that was restarted answers well, with the weights it was started with.
"""

import asyncio

MAX_FAILURES = 3
FIRST_REST_S = 0.5


class Circuit:
    """After a failure that does not open the circuit the engine rests, so that a retry goes elsewhere if it can."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self.num_failures = 0
        """Failures since the last success."""
        self.rests_until = 0.0
        self.reason = ""
        """Why it is open, and later why it still is; empty while it is closed."""

    @property
    def is_open(self) -> bool:
        """Whether the engine is out of service."""
        return self._opened.is_set()

    def succeeded(self) -> None:
        """A request was answered. A late answer to a request of before does not close an open circuit."""
        self.num_failures = 0
        self.rests_until = 0.0

    def failed(self, reason: str, now: float) -> bool:
        """A request was not answered. Whether this is the failure that opened the circuit."""
        # Thousands of requests may fail with their engine: the power must not grow with them.
        self.rests_until = now + FIRST_REST_S * 2 ** min(self.num_failures, MAX_FAILURES)
        self.num_failures += 1
        return self.num_failures >= MAX_FAILURES and self.open(reason)

    def open(self, reason: str) -> bool:
        """Out of service from now on. Whether it was in service."""
        was_closed = not self.is_open
        if was_closed:
            self.reason = reason
        self._opened.set()
        return was_closed

    def close(self) -> None:
        """Back in service."""
        self._opened.clear()
        self.reason = ""
        self.succeeded()

    async def wait_open(self) -> None:
        """Return once it is out of service; it may work for ever."""
        await self._opened.wait()
