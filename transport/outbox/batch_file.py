"""`BatchFile`: one batch on disk, in the outbox, among retired batches, or in a recording.

    magic (8) | manifest bytes (u64) | xxh3_64 of the manifest (u64) | manifest | frame 0 | frame 1 | ...

All little-endian. The manifest's `num_bytes` column is the index of the frames, so reading a few rows reads only them.
"""

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from transport.errors import OutboxError, OutboxVersionError, SchemaMismatch, TransportError
from transport.wire.batch import EncodedBatch
from transport.wire.codec import decode_manifest, encode, frame_hash
from transport.wire.manifest import BatchManifest
from transport.wire.tensor import Buffer

MAGIC = b"TANDEM\x00\x01"
_HEAD = struct.Struct("<8sQQ")


def file_chunks(batch: EncodedBatch) -> Iterator[Buffer]:
    """The bytes of the file of `batch`, piece by piece."""
    manifest = encode(batch.manifest)
    yield _HEAD.pack(MAGIC, len(manifest), frame_hash(manifest))
    yield manifest
    yield from batch.frames


class BatchFile:
    """Reads a batch file. May be used from several threads; the file must not change, only be renamed or removed.

    Every `OutboxError` names the path. The head is checked on opening, each frame's hash when it is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest, first_frame, num_bytes = self._read_head()
        sizes = self.manifest.columns.num_bytes.numpy()
        self._ends = first_frame + np.cumsum(sizes, dtype=np.int64)
        self._starts = self._ends - sizes
        self._check_size(num_bytes)

    def frames(self, rows: Sequence[int]) -> list[memoryview]:
        """The frames of `rows`, in that order, byte for byte as they were put. They lie in a mapping of the file, which
        ends with the last of them."""
        try:
            with self.path.open("rb") as file:
                mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise OutboxError(f"cannot read {self.path}: {error}") from error
        self._check_size(len(mapped))  # reading beyond the end of a file that was cut short would be a SIGBUS
        return [self._checked_frame(mapped, row) for row in rows]

    def batch(self) -> EncodedBatch:
        """The whole batch, every hash checked."""
        return EncodedBatch(self.manifest, tuple(self.frames(range(self.manifest.num_samples))))

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes != int(self._ends[-1]):
            raise OutboxError(f"{self.path} is torn: {num_bytes} bytes, its manifest says {int(self._ends[-1])}")

    def _checked_frame(self, mapped: memoryview, row: int) -> memoryview:
        if not 0 <= row < self.manifest.num_samples:
            raise OutboxError(f"{self.path} has no row {row}: it has {self.manifest.num_samples}")
        frame = mapped[int(self._starts[row]) : int(self._ends[row])]
        if frame_hash(frame) != int(self.manifest.columns.frame_hashes.numpy()[row]):
            raise OutboxError(f"{self.path} is corrupt: row {row} does not have the hash its manifest promises")
        return frame

    def _read_head(self) -> tuple[BatchManifest, int, int]:
        """The manifest, where the first frame begins, and how large the file is."""
        try:
            with self.path.open("rb") as file:
                head = file.read(_HEAD.size)
                magic, size, expected_hash = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
                if magic != MAGIC:
                    raise OutboxError(f"{self.path} is not a batch file of this version")
                num_bytes = os.fstat(file.fileno()).st_size
                if size > num_bytes:
                    raise OutboxError(f"{self.path} is torn: its manifest alone would be {size} bytes")
                data = file.read(size)
        except OSError as error:
            raise OutboxError(f"cannot read {self.path}: {error}") from error
        if frame_hash(data) != expected_hash:
            raise OutboxError(f"{self.path} is corrupt: its manifest does not have the hash its head promises")
        try:
            return decode_manifest(data), _HEAD.size + size, num_bytes
        except SchemaMismatch as error:
            raise OutboxVersionError(
                f"{self.path} is a batch of schema version {error.theirs}, this tandem-rl has {error.ours}: go on with "
                "the tandem-rl that wrote it, or start a new run from the last weights that it published"
            ) from error
        except TransportError as error:
            raise OutboxError(f"{self.path} cannot be used: {error}") from error
