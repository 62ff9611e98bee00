"""A real batch server in the test process, in the place of the orchestrator."""

from pathlib import Path

from tests.support.fakes import Served
from tests.trainer.shell.recorded import make_batch
from transport.outbox.outbox import Outbox


class StandIn(Served):
    """Serves the batches that it is told to publish."""

    def __init__(self, folder: Path, run_id: str, endpoint: str = "tcp://127.0.0.1:0") -> None:
        self.outbox = Outbox(folder, run_id, keep_retired=True)
        super().__init__(self.outbox, endpoint)
        self._run_id = run_id

    def publish(self, *steps: int) -> None:
        """Store and announce these batches."""
        for step in steps:
            self.call(self.server.publish(make_batch(self._run_id, step)))

    def end(self, last_step: int) -> None:
        """Tell the trainer that the run is over after `last_step`."""
        self._loop.call_soon_threadsafe(self.server.end, last_step)

    @property
    def progress(self) -> tuple[int, int]:
        """(last trained, last committed)."""
        return self.outbox.progress.last_trained, self.outbox.progress.last_committed

    @property
    def version(self) -> int | None:
        """Newest policy version that was announced."""
        weights = self.outbox.progress.weights
        return None if weights is None else weights.version
