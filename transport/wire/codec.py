"""Bytes to messages and samples, and back. Typed, strict, and the only place that decodes what a peer sent."""

from typing import TypeVar

import msgspec
import numpy as np
import xxhash

from transport.errors import CodecError, CorruptFrame, SchemaMismatch
from transport.wire.manifest import SCHEMA_VERSION, BatchManifest
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
