"""Bytes to messages and samples, and back. Typed, strict, and the only place that decodes what a peer sent."""

from typing import TypeVar

import msgspec
import numpy as np
import xxhash

from transport.errors import CodecError, CorruptFrame
from transport.manifest import SCHEMA_VERSION, BatchManifest
from transport.messages import ClientMessage, ServerMessage
from transport.sample import TrainingSample
from transport.tensor import EncodedTensor

_T = TypeVar("_T")
Buffer = bytes | bytearray | memoryview

_encoder = msgspec.msgpack.Encoder()
_sample_decoder = msgspec.msgpack.Decoder(TrainingSample)
_manifest_decoder = msgspec.msgpack.Decoder(BatchManifest)
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)


def encode(value: msgspec.Struct) -> bytes:
    """Msgpack bytes of any wire type."""
    return _encoder.encode(value)


def decode_client_message(data: Buffer) -> ClientMessage:
    """What a trainer rank sent."""
    return _decode(_client_decoder, data, "client message")


def decode_server_message(data: Buffer) -> ServerMessage:
    """What the orchestrator sent."""
    return _decode(_server_decoder, data, "server message")


def decode_manifest(data: Buffer) -> BatchManifest:
    """A checked manifest of our schema version."""
    manifest = _decode(_manifest_decoder, data, "batch manifest")
    manifest.check()
    return manifest


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


def is_current(manifest: BatchManifest) -> bool:
    """Whether the manifest was written by this schema version."""
    return manifest.schema_version == SCHEMA_VERSION


def int32(values: "list[int] | np.ndarray[tuple[int], np.dtype[np.int32]]") -> EncodedTensor:
    """An int32 vector (a handful of row indices; never one number per token in a list)."""
    return EncodedTensor.of(np.asarray(values, dtype=np.int32))


def _decode(decoder: "msgspec.msgpack.Decoder[_T]", data: Buffer, what: str) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CodecError(f"not a valid {what}: {error}") from error
