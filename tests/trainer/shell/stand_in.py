"""A real batch server in the test process, in the place of the orchestrator."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.trainer.shell.recorded import make_batch
from transport.outbox import Outbox
from transport.server import BatchServer


class StandIn:
    """Serves the batches it is told to publish. Runs its event loop in a thread, so that a test may block."""

    def __init__(self, folder: Path, run_id: str, endpoint: str = "tcp://127.0.0.1:0") -> None:
        self.outbox = Outbox(folder, run_id, keep_retired=True)
        self.endpoint = endpoint
        self._run_id = run_id
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)

    def publish(self, *steps: int) -> None:
        """Store and announce these batches."""
        for step in steps:
            batch = make_batch(self._run_id, step)
            asyncio.run_coroutine_threadsafe(self._server.publish(batch), self._loop).result(timeout=10)

    def end(self, last_step: int) -> None:
        """Tell the trainer that the run is over after `last_step`."""
        self._loop.call_soon_threadsafe(self._server.end, last_step)

    @property
    def progress(self) -> tuple[int, int]:
        """(last trained, last committed)."""
        return self.outbox.progress.last_trained, self.outbox.progress.last_committed

    @property
    def version(self) -> int | None:
        """Newest policy version that was announced."""
        weights = self.outbox.progress.weights
        return None if weights is None else weights.version

    def open(self) -> None:
        """Start to serve; `endpoint` is then the real one."""
        self._thread.start()
        assert self._ready.wait(timeout=10)

    def close(self) -> None:
        """Stop serving."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(timeout=10)
        self._loop.close()

    async def _serve(self) -> None:
        async with BatchServer(self.endpoint, self.outbox) as server:
            self._server, self.endpoint = server, server.endpoint
            self._task = asyncio.create_task(server.serve())
            self._ready.set()
            await asyncio.gather(self._task, return_exceptions=True)


@contextmanager
def stand_in(folder: Path, run_id: str, endpoint: str = "tcp://127.0.0.1:0") -> Iterator[StandIn]:
    """A stand-in that serves while the block lasts."""
    server = StandIn(folder, run_id, endpoint)
    server.open()
    try:
        yield server
    finally:
        server.close()
