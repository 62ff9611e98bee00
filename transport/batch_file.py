"""`BatchFile`: one batch on disk, in the outbox, among retired batches, or in a recording.

    magic (8) | manifest bytes (u64) | xxh3_64 of the manifest (u64) | manifest | frame 0 | frame 1 | ...

All little-endian. The manifest's `num_bytes` column is the index of the frames, so reading a few rows reads only them.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from transport.alignment import LINE_BYTES, address_of, lead_bytes
from transport.batch import EncodedBatch
from transport.codec import decode_manifest, encode, frame_hash
from transport.errors import OutboxError, TransportError
from transport.frames_on_demand import FramesOnDemand
from transport.manifest import BatchManifest
from transport.reply_memory import ReplyMemory
from transport.tensor import Buffer

MAGIC = b"TANDEM\x00\x01"
_HEAD = struct.Struct("<8sQQ")


def file_chunks(batch: EncodedBatch) -> Iterator[Buffer]:
    """The bytes of the file of `batch`, piece by piece; a piece is of use until the next one is asked for."""
    manifest = encode(batch.manifest)
    yield _HEAD.pack(MAGIC, len(manifest), frame_hash(manifest))
    yield manifest
    if isinstance(batch.frames, FramesOnDemand):
        yield from batch.frames.pieces(_HEAD.size + len(manifest))
    else:
        yield from batch.frames


class BatchFile:
    """Reads a batch file. Holds no descriptor between calls; may be used from several threads.

    Every `OutboxError` names the path. The head is checked on opening, each frame's hash when it is read by `frames`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest, first_frame, num_bytes = self._read_head()
        sizes = self.manifest.columns.num_bytes.numpy()
        self._ends = first_frame + np.cumsum(sizes, dtype=np.int64)
        self._starts = self._ends - sizes
        if num_bytes != int(self._ends[-1]):
            raise OutboxError(f"{path} is torn: {num_bytes} bytes, its manifest says {int(self._ends[-1])}")

    def frames(self, rows: Sequence[int]) -> list[memoryview]:
        """The frames of `rows`, in that order, byte for byte as they were put."""
        frames = []
        for row, frame in zip(rows, self.raw_frames(rows), strict=True):
            self._check_frame(frame, row)
            frames.append(frame)
        return frames

    def raw_frames(self, rows: Sequence[int]) -> Iterator[memoryview]:
        """The same one by one, for those who compare the hash themselves, while the frame is still in a cache."""
        self._check_rows(rows)
        try:
            with self.path.open("rb", buffering=0) as file:
                for row in rows:
                    start, end = int(self._starts[row]), int(self._ends[row])
                    memory = np.empty(end - start + LINE_BYTES, dtype=np.uint8)
                    first = lead_bytes(start, address_of(memory))
                    frame = memory[first : first + end - start].data
                    self._fill(frame, file.fileno(), row)
                    yield frame.toreadonly()
        except OSError as error:
            raise OutboxError(f"cannot read {self.path}: {error}") from error

    def read(self, rows: Sequence[int], memory: ReplyMemory, *, check: bool) -> list[memoryview]:
        """The same as `frames`, in one piece of `memory`; the hashes are compared if `check`."""
        self._check_rows(rows)
        places, end = [], 0
        for row in rows:
            start = end + lead_bytes(int(self._starts[row]), end)
            end = start + int(self._ends[row] - self._starts[row])
            places.append(slice(start, end))
        whole, views = memory.take(end), []
        try:
            with self.path.open("rb", buffering=0) as file:
                for row, place in zip(rows, places, strict=True):
                    views.append(whole[place])
                    self._fill(views[-1], file.fileno(), row)
                    if check:
                        self._check_frame(views[-1], row)
        except OSError as error:
            raise OutboxError(f"cannot read {self.path}: {error}") from error
        return views

    def batch(self) -> EncodedBatch:
        """The whole batch, every hash checked."""
        return EncodedBatch(self.manifest, tuple(self.frames(range(self.manifest.num_samples))))

    def _fill(self, frame: memoryview, descriptor: int, row: int) -> None:
        num_read = os.preadv(descriptor, [frame], int(self._starts[row]))
        if num_read != len(frame):
            raise OutboxError(f"{self.path} is torn: row {row} has {num_read} bytes left of {len(frame)}")

    def _check_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            if not 0 <= row < self.manifest.num_samples:
                raise OutboxError(f"{self.path} has no row {row}: it has {self.manifest.num_samples}")

    def _check_frame(self, frame: Buffer, row: int) -> None:
        if frame_hash(frame) != int(self.manifest.columns.frame_hashes.numpy()[row]):
            raise OutboxError(f"{self.path} is corrupt: row {row} does not have the hash its manifest promises")

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
        except TransportError as error:
            raise OutboxError(f"{self.path} cannot be used: {error}") from error
