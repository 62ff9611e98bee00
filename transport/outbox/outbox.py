"""`Outbox`: every batch that a trainer may still ask for, on disk before it is announced.

    outbox/step-00000012.batch     batch 12, whole (transport/outbox/outbox.py)
    outbox/progress.json           what the trainer reported (transport/outbox/progress.py)
    outbox/retired/                batches kept for replay, if asked for

Invariant: the steps on disk are exactly `last_retired + 1 ... next_step - 1`, without a gap: all that no checkpoint
contains, and those of the newest checkpoint, in case it cannot be read back. A commit is recorded before a file goes,
so a kill between the two leaves a file that the next start retires.

`BatchFile`: one batch on disk, in the outbox, among retired batches, or in a recording.

    magic (8) | manifest bytes (u64) | xxh3_64 of the manifest (u64) | manifest | frame 0 | frame 1 | ...

All little-endian. The manifest's `num_bytes` column is the index of the frames, so reading a few rows reads only them.
"""

import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from loguru import logger

from transport.durable import remove_temporaries, sync_directory, write_durably
from transport.errors import OutboxError, OutboxVersionError, SchemaMismatch, TransportError
from transport.outbox.progress import PublishedWeights, ReportedProgress
from transport.wire.codec import EncodedBatch, decode_manifest, encode, frame_hash
from transport.wire.manifest import BatchManifest
from transport.wire.sample import Buffer

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


PROGRESS_NAME = "progress.json"
RETIRED_NAME = "retired"


def batch_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}.batch"


class Outbox:
    """Durable batches of run `run_id` in `directory`. Blocking; safe to call from several threads; one process owns it.

    Opening recovers from any kill: temporary files go, retiring is finished, and what cannot be trusted (a torn or
    corrupt file, a gap, another run's files) is an `OutboxError` that names the path.
    """

    def __init__(self, directory: Path, run_id: str, *, keep_retired: bool = False) -> None:
        self.directory = directory
        self.run_id = run_id
        self._keep_retired = keep_retired
        self._lock = threading.Lock()
        self._is_recorded = True
        (directory / RETIRED_NAME if keep_retired else directory).mkdir(parents=True, exist_ok=True)
        remove_temporaries(directory)
        self._progress = self._read_progress()
        self._files = self._recover()

    @property
    def progress(self) -> ReportedProgress:
        """What the trainer reported so far."""
        return self._progress

    @property
    def next_step(self) -> int:
        """The step that `put` expects."""
        return max(self._files, default=self._progress.last_committed) + 1

    @property
    def num_untrained(self) -> int:
        """Batches that no optimizer step has used yet."""
        return max(0, self.next_step - 1 - self._progress.last_trained)

    def steps(self) -> list[int]:
        """Steps that no durable checkpoint contains yet, ascending."""
        held = tuple(self._files)  # at once: another thread may retire some
        return sorted(step for step in held if step > self._progress.last_committed)

    def put(self, batch: EncodedBatch) -> None:
        """Store a batch durably. The same batch again is a no-op; another one under its step, or a gap, is an error."""
        manifest = batch.manifest
        self._check_run(manifest, "batch")
        with self._lock:
            held = self._files.get(manifest.step)
            if held is not None and held.manifest.digest == manifest.digest:
                return
            if manifest.step != self.next_step:
                raise OutboxError(f"{self.directory} expects batch {self.next_step}, got another batch {manifest.step}")
            path = batch_path(self.directory, manifest.step)
            try:
                write_durably(path, file_chunks(batch))
            except OSError as error:
                raise OutboxError(f"cannot store batch {manifest.step} in {path}: {error}") from error
            self._files[manifest.step] = BatchFile(path)

    def manifest(self, step: int) -> BatchManifest:
        return self._file(step).manifest

    def frames(self, step: int, rows: Sequence[int]) -> list[memoryview]:
        """Frames of `rows` of batch `step`, each with the hash that the manifest promises; reads only those."""
        return self._file(step).frames(rows)

    def mark_trained(self, step: int) -> None:
        """Record that the optimizer stepped on batch `step`. Repeating it changes nothing."""
        with self._lock:
            self._check_cut(step)
            self._advance(self._progress.with_trained(step))

    def mark_weights(self, weights: PublishedWeights) -> None:
        """Record a weight announcement. Repeating it changes nothing."""
        with self._lock:
            self._advance(self._progress.with_weights(weights))

    def retire(self, up_to_step: int) -> None:
        """A durable checkpoint contains `up_to_step`: record that, then let go of the batches of the commit before."""
        with self._lock:
            self._check_cut(up_to_step)
            self._advance(self._progress.with_committed(up_to_step))
            if self._is_recorded:
                self._drop_retired(self._files)

    def fall_back(self, step: int) -> None:
        """The trainer could not read back its newest checkpoint and went on from that of `step`."""
        with self._lock:
            self._advance(self._progress.with_fallback(step))

    def _advance(self, progress: ReportedProgress) -> None:
        """Progress counts in memory even if the disk refuses: the trainer repeats what matters in its next `Hello`."""
        if progress == self._progress and self._is_recorded:
            return
        self._progress = progress
        path = self.directory / PROGRESS_NAME
        try:
            write_durably(path, [msgspec.json.encode(progress)])
        except OSError as error:
            self._is_recorded = False
            logger.warning("cannot record progress in {}: {}; tried again at the next report", path, error)
        else:
            self._is_recorded = True

    def _drop_retired(self, files: dict[int, BatchFile]) -> None:
        retired = [step for step in files if step <= self._progress.last_retired]
        try:
            for step in retired:
                self._let_go(files.pop(step).path)
        except OSError as error:
            logger.warning("cannot retire a batch in {}: {}; the next start tries again", self.directory, error)

    def _let_go(self, path: Path) -> None:
        if self._keep_retired:
            path.replace(self.directory / RETIRED_NAME / path.name)
            sync_directory(self.directory / RETIRED_NAME)
        else:
            path.unlink(missing_ok=True)

    def _file(self, step: int) -> BatchFile:
        held = self._files.get(step)
        if held is None:
            state = "was retired" if step <= self._progress.last_retired else "does not exist"
            raise OutboxError(f"batch {step} {state}: {self.directory} holds steps {self.steps()}")
        return held

    def _check_cut(self, step: int) -> None:
        if not 0 < step < self.next_step:
            raise OutboxError(f"batch {step} was never cut: the next one in {self.directory} is {self.next_step}")

    def _check_run(self, owner: BatchManifest | ReportedProgress, what: str) -> None:
        if owner.run_id != self.run_id:
            raise OutboxError(f"{what} of run {owner.run_id!r} does not belong in {self.directory} of {self.run_id!r}")

    def _read_progress(self) -> ReportedProgress:
        path = self.directory / PROGRESS_NAME
        try:
            progress = msgspec.json.decode(path.read_bytes(), type=ReportedProgress)
        except FileNotFoundError:
            return ReportedProgress(run_id=self.run_id)
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            raise OutboxError(f"cannot read progress from {path}: {error}") from error
        self._check_run(progress, str(path))
        return progress

    def _recover(self) -> dict[int, BatchFile]:
        opened = [BatchFile(path) for path in self.directory.glob("step-*.batch")]
        for file in opened:
            self._check_run(file.manifest, str(file.path))
            if file.path != batch_path(self.directory, file.manifest.step):
                raise OutboxError(f"{file.path} holds batch {file.manifest.step}")
        files = {file.manifest.step: file for file in sorted(opened, key=lambda file: file.manifest.step)}
        self._drop_retired(files)
        for expected, step in enumerate(files, start=self._progress.last_retired + 1):
            if step != expected:
                raise OutboxError(
                    f"{batch_path(self.directory, expected)} is missing: a batch was neither trained nor kept"
                )
        return files
