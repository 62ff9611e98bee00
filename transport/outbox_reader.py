"""`OutboxReader`: rows of a batch straight from the server's files, for a rank that sees them.

What the link would carry lies in the page cache of the same machine: reading it there saves two copies through a
socket and one into the server's memory. The server still says which batch is next, and what each row must hash to.
"""

from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from transport.batch import decode_rows
from transport.batch_file import BatchFile
from transport.errors import CodecError, OutboxError
from transport.manifest import BatchManifest
from transport.outbox import batch_path
from transport.sample import TrainingSample


class OutboxReader:
    """Reads batch files in `directory` and changes nothing there. Use it from one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: BatchFile | None = None
        self._has_warned = False

    def samples(self, manifest: BatchManifest, rows: Sequence[int]) -> list[TrainingSample] | None:
        """The samples of `rows`, each checked against the hash in `manifest`, which came from the server.

        None if they cannot be had here: no such file, another batch, damage. Then the server must be asked, which
        knows what is wrong with its files. The first time that is logged with the reason.
        """
        try:
            frames = self._open(manifest).raw_frames(rows)
            return [decode_rows(manifest, [row], [frame])[0] for row, frame in zip(rows, frames, strict=True)]
        except (OutboxError, CodecError) as error:
            self._file = None
            if not self._has_warned:
                self._has_warned = True
                logger.warning("samples come over the link, not from {}: {}", self._directory, error)
            return None

    def _open(self, manifest: BatchManifest) -> BatchFile:
        if self._file is None or self._file.manifest.digest != manifest.digest:
            file = BatchFile(batch_path(self._directory, manifest.step))
            if (file.manifest.run_id, file.manifest.digest) != (manifest.run_id, manifest.digest):
                raise OutboxError(f"{file.path} is not the batch {manifest.step} that the orchestrator serves")
            self._file = file
        return self._file
