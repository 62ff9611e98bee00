"""`ReplaySource`: recorded `step-*.batch` files instead of an orchestrator.

The folder is an outbox, whose `retired/` folder counts too (`server.record_batches` fills it), or any other with such
files. On a CPU, the same files, seed and config give the same weights, bit for bit.
"""

from collections.abc import Sequence
from pathlib import Path

from runtime.errors import UserError
from trainer.batches.source import NoBatch
from transport.errors import TransportError
from transport.outbox.outbox import RETIRED_NAME, BatchFile, batch_path
from transport.wire.codec import decode_rows
from transport.wire.manifest import BatchManifest
from transport.wire.sample import TrainingSample


class ReplaySource:
    """A `BatchSource`: the batches of a folder, in order, up to the last one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        found = (path for folder in self._folders() for path in folder.glob("step-*.batch"))
        self._steps = sorted({int(path.stem.removeprefix("step-")) for path in found})
        if not self._steps:
            raise UserError(f"nothing to replay: no step-*.batch in {directory}")

    def manifest(self, step: int) -> BatchManifest | NoBatch:
        """The recorded batch; `UserError` if it is missing although later ones are there, or unreadable."""
        if step > self._steps[-1]:
            return NoBatch.END
        if step not in self._steps:
            raise UserError(
                f"{self._directory} has steps {self._steps[0]} to {self._steps[-1]}, but not step {step}, which comes "
                "next: replay from a checkpoint of the step before, or add the missing file"
            )
        return self._file(step).manifest

    def samples(self, manifest: BatchManifest, rows: Sequence[int]) -> Sequence[TrainingSample]:
        try:
            return decode_rows(manifest, rows, self._file(manifest.step).frames(rows))
        except TransportError as error:
            raise UserError(f"cannot replay: {error}") from error

    def close(self, reason: str) -> None:
        """Does nothing: there is no connection."""

    def _folders(self) -> tuple[Path, Path]:
        return self._directory, self._directory / RETIRED_NAME

    def _file(self, step: int) -> BatchFile:
        paths = [batch_path(folder, step) for folder in self._folders()]
        try:
            return BatchFile(next((path for path in paths if path.exists()), paths[0]))
        except TransportError as error:
            raise UserError(f"cannot replay: {error}") from error
