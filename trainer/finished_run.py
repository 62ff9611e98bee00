"""`FinishedRun`: the source of a run whose last step is durable and whose orchestrator is gone.

A trainer that is killed after its last checkpoint and started again finds nobody: the orchestrator ends when it knows
that the last step is committed. There is nothing left to fetch, and nobody left to tell.
"""

from collections.abc import Sequence

from trainer.batch_source import NoBatch, Unattended
from transport.wire.manifest import BatchManifest
from transport.wire.sample import TrainingSample


class FinishedRun(Unattended):
    """A `BatchSource` without batches."""

    def manifest(self, step: int) -> NoBatch:
        """The run is over."""
        return NoBatch.END

    def samples(self, manifest: BatchManifest, rows: Sequence[int]) -> Sequence[TrainingSample]:
        """Never asked for: there is no batch."""
        raise AssertionError(f"samples of batch {manifest.step} of a finished run")
