"""Bytes to messages and samples, and back. Typed, strict, and the only place that decodes what a peer sent.

`EncodedBatch` is batch N as it lies in the outbox and travels to the ranks. A sample of text is encoded once, one with
images whenever its frame is needed: a frame repeats every byte of its sample, and pixels are nearly all of them, so a
batch of images would be held twice.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from transport.errors import CodecError, CorruptFrame, SchemaMismatch
from transport.wire.manifest import IMAGE, SCHEMA_VERSION, TEXT, BatchManifest, SampleColumns
from transport.wire.messages import ClientMessage, ServerMessage
from transport.wire.sample import Buffer, EncodedTensor, TrainingSample

_T = TypeVar("_T")


class _Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """What `Hello` and `Refusal` of every schema version have in common."""

    kind: str
    seq: int
    schema_version: int


_encoder = msgspec.msgpack.Encoder()
_sample_decoder = msgspec.msgpack.Decoder(TrainingSample)
_manifest_decoder = msgspec.msgpack.Decoder(BatchManifest)
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)
_greeting_decoder = msgspec.msgpack.Decoder(_Greeting)


def encode(value: msgspec.Struct) -> bytes:
    """Msgpack bytes of any wire type."""
    return _encoder.encode(value)


def encode_sample(sample: TrainingSample) -> bytes:
    """The frame of one sample; `CodecError` if the sample is not sound."""
    sample.check()
    return _encoder.encode(sample)


def decode_client_message(data: Buffer) -> ClientMessage:
    return _decode(_client_decoder, data, "client message")


def decode_server_message(data: Buffer) -> ServerMessage:
    return _decode(_server_decoder, data, "server message")


def foreign_greeting(data: Buffer) -> tuple[int, int] | None:
    """`(seq, schema_version)` if `data`, which did not decode, is a greeting of another schema version."""
    try:
        greeting = _decode(_greeting_decoder, data, "greeting")
    except CodecError:
        return None
    if greeting.kind not in ("hello", "welcome", "refusal") or greeting.schema_version == SCHEMA_VERSION:
        return None
    return greeting.seq, greeting.schema_version


def decode_manifest(data: Buffer) -> BatchManifest:
    """A manifest that passed `check_manifest`."""
    manifest = _decode(_manifest_decoder, data, "batch manifest")
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: BatchManifest) -> None:
    """Raise `SchemaMismatch` (another version's), `CodecError` (unsound) or `CorruptFrame` (changed)."""
    if manifest.schema_version != SCHEMA_VERSION:
        raise SchemaMismatch(SCHEMA_VERSION, manifest.schema_version)
    manifest.check()
    if batch_digest(manifest.columns.frame_hashes) != manifest.digest:
        raise CorruptFrame(f"manifest of batch {manifest.step} does not have the digest it names")


def decode_sample(data: Buffer, expected_hash: int | None = None) -> TrainingSample:
    """A checked sample whose arrays are views into `data`. `CorruptFrame` if the bytes do not have `expected_hash`."""
    if expected_hash is not None and xxhash.xxh3_64_intdigest(data) != expected_hash:
        raise CorruptFrame(f"sample frame of {len(data)} bytes does not have the hash its manifest promises")
    sample = _decode(_sample_decoder, data, "training sample")
    sample.check()
    return sample


def frame_hash(frame: Buffer) -> int:
    """The hash that `SampleColumns.frame_hashes` keeps."""
    return xxhash.xxh3_64_intdigest(frame)


def batch_digest(frame_hashes: EncodedTensor) -> str:
    """`BatchManifest.digest` of these frames."""
    return xxhash.xxh3_128_hexdigest(frame_hashes.data)


def int32(values: "list[int] | np.ndarray[tuple[int], np.dtype[np.int32]]") -> EncodedTensor:
    """An int32 vector (a handful of row indices; never one number per token in a list)."""
    return EncodedTensor.of(np.asarray(values, dtype=np.int32))


def _decode(decoder: "msgspec.msgpack.Decoder[_T]", data: Buffer, what: str) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CodecError(f"not a valid {what}: {error}") from error


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A manifest and one frame per row of its columns."""

    manifest: BatchManifest
    frames: Sequence[Buffer]

    @property
    def num_bytes(self) -> int:
        return int(self.manifest.columns.num_bytes.numpy().sum())


class _LazyFrames(Sequence[bytes]):
    """One frame per sample, encoded whenever it is looked at. The samples must be sound, and must not change."""

    def __init__(self, samples: Sequence[TrainingSample]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[bytes]: ...
    def __getitem__(self, place: int | slice) -> bytes | Sequence[bytes]:
        return _LazyFrames(self._samples[place]) if isinstance(place, slice) else encode(self._samples[place])


def build_batch(run_id: str, step: int, samples: Sequence[TrainingSample]) -> EncodedBatch:
    """Encode `samples`, in this order, as batch `step` of run `run_id`. Equal inputs give equal bytes.

    `CodecError` names the sample that is not sound or belongs to another run; an empty batch is one too.
    """
    if not samples:
        raise CodecError(f"batch {step} of run {run_id} has no samples")
    for sample in samples:
        if sample.run_id != run_id:
            raise CodecError(f"sample {sample.trajectory_id} of run {sample.run_id} does not belong to run {run_id}")
    has_images = any(sample.mm_kwargs for sample in samples)
    frames, sizes, hashes = [], [], []
    for sample in samples:
        frame = encode_sample(sample)
        sizes.append(len(frame))
        hashes.append(frame_hash(frame))
        if not has_images:
            frames.append(frame)
    env_names = tuple(dict.fromkeys(sample.env_name for sample in samples))
    columns = _columns(samples, sizes, hashes)
    manifest = BatchManifest(
        schema_version=SCHEMA_VERSION,
        run_id=run_id,
        step=step,
        digest=batch_digest(columns.frame_hashes),
        env_names=env_names,
        columns=columns,
    )
    manifest.check()
    return EncodedBatch(manifest, _LazyFrames(tuple(samples)) if has_images else tuple(frames))


def decode_rows(manifest: BatchManifest, rows: Sequence[int], frames: Sequence[Buffer]) -> list[TrainingSample]:
    """The samples of `rows`, checked against the hashes of `manifest`: `CorruptFrame` if any byte differs.

    `CodecError` for a sample of another run: what trains one policy, or one adapter, never comes from two.
    """
    if len(rows) != len(frames):
        raise CodecError(f"batch {manifest.step}: {len(frames)} frames came for {len(rows)} rows")
    hashes = manifest.columns.frame_hashes.numpy()
    samples = [decode_sample(frame, int(hashes[row])) for row, frame in zip(rows, frames, strict=True)]
    for row, sample in zip(rows, samples, strict=True):
        if sample.run_id != manifest.run_id:
            raise CodecError(f"row {row} of batch {manifest.step} is of run {sample.run_id}, not {manifest.run_id}")
    return samples


def decode_batch(batch: EncodedBatch) -> list[TrainingSample]:
    """All samples, in batch order."""
    return decode_rows(batch.manifest, range(batch.manifest.num_samples), batch.frames)


def _columns(samples: Sequence[TrainingSample], sizes: Sequence[int], hashes: Sequence[int]) -> SampleColumns:
    return SampleColumns(
        lengths=_column(np.int32, (sample.num_tokens for sample in samples)),
        loss_tokens=_column(np.int32, (sample.num_loss_tokens for sample in samples)),
        env_ids=_numbered(sample.env_name for sample in samples),
        groups=_numbered(sample.group_id for sample in samples),
        trajectories=_numbered(sample.trajectory_id for sample in samples),
        modalities=_column(np.uint8, (IMAGE if sample.mm_kwargs else TEXT for sample in samples)),
        num_bytes=_column(np.int64, sizes),
        oldest_versions=_column(np.int32, (_oldest_version(sample) for sample in samples)),
        frame_hashes=_column(np.uint64, hashes),
    )


def _oldest_version(sample: TrainingSample) -> int:
    return -1 if sample.oldest_version is None else sample.oldest_version


def _column(dtype: npt.DTypeLike, values: Iterable[int]) -> EncodedTensor:
    return EncodedTensor.of(np.fromiter(values, dtype=dtype))


def _numbered(names: Iterable[Hashable]) -> EncodedTensor:
    """Numbers by first appearance: `b, a, b` becomes `0, 1, 0`."""
    numbers: dict[Hashable, int] = {}
    return _column(np.int32, (numbers.setdefault(name, len(numbers)) for name in names))
