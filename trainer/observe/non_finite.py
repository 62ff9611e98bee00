"""What happens after a step with a NaN or an infinity: no rank stepped, the batch is kept, and too many end the run."""

from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from trainer.batches.source import BatchSource
from trainer.errors import NonFiniteError
from trainer.ranks import Ranks
from trainer.step.report import StepReport, TrainProgress
from transport.durable import write_durably
from transport.outbox.outbox import batch_path, file_chunks
from transport.wire.codec import build_batch
from transport.wire.manifest import BatchManifest


class NonFiniteGuard:
    """Keeps bad batches in `folder`, for `trainer --replay`, and counts them."""

    def __init__(self, folder: Path, max_in_a_row: int, ranks: Ranks, source: BatchSource) -> None:
        self._folder = folder
        self._max_in_a_row = max_in_a_row
        self._ranks = ranks
        self._source = source

    def check(self, batch: BatchManifest, reports: Sequence[StepReport], progress: TrainProgress) -> None:
        """Raise `NonFiniteError` if of too many batches in a row, up to this one, an optimizer step was skipped."""
        if progress.num_non_finite == 0:
            return
        kept = self._ranks.wait_together(lambda: self._keep(batch) if self._ranks.is_first else "")
        if self._ranks.is_first:
            num_skipped = sum(not report.stepped for report in reports)
            logger.warning(
                f"step {batch.step}: loss or gradient is not finite, {num_skipped} of {len(reports)} optimizer steps "
                f"skipped ({progress.num_non_finite} in a row, at most {self._max_in_a_row}); {kept}"
            )
        if progress.num_non_finite >= self._max_in_a_row:
            raise NonFiniteError(
                f"loss or gradient were not finite for {progress.num_non_finite} steps in a row, up to {batch.step}; "
                f"the batches are in {self._folder}, the last good state is the newest checkpoint"
            )

    def _keep(self, batch: BatchManifest) -> str:
        rows = range(batch.num_samples)
        path = batch_path(self._folder, batch.step)
        try:
            samples = self._source.samples(batch, rows)
            self._folder.mkdir(parents=True, exist_ok=True)
            write_durably(path, file_chunks(build_batch(batch.run_id, batch.step, samples)))
        except OSError as error:  # the batch is a help for people; a full disk must not hide the real trouble
            return f"the batch could not be kept: {error}"
        return f"the batch is kept in {path}"
