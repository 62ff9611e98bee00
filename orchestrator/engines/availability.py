"""`Availability`: whether any engine can generate at all, so that nobody sends work into an outage."""

import asyncio


class Availability:
    """Open at first. One owner calls `lost` and `restored`; any number of tasks of the same event loop `wait`."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.reason = ""
        """Why nothing can be generated; empty while something can."""
        self.num_outages = 0
        """Outages that have begun. A task that sees it change knows that one fell into its time."""

    @property
    def is_open(self) -> bool:
        """Whether an engine is in service."""
        return self._open.is_set()

    def lost(self, reason: str) -> None:
        """The last engine has left the service, or another reason has been found why none is back."""
        if self.is_open:
            self.num_outages += 1
        self.reason = reason
        self._open.clear()

    def restored(self) -> None:
        """An engine is in service. Idempotent."""
        self.reason = ""
        self._open.set()

    async def wait(self) -> None:
        """Return once an engine is in service. No deadline: the caller has one, or shows what it waits for."""
        await self._open.wait()
