"""Whatever bytes come, the codec returns a sound value or raises its own errors; nothing else ever escapes."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tests.transport.samples import make_batch, make_sample
from transport.errors import CodecError, CorruptFrame, SchemaMismatch
from transport.wire.codec import (
    check_manifest,
    decode_client_message,
    decode_manifest,
    decode_sample,
    decode_server_message,
    encode,
    encode_sample,
    foreign_greeting,
    int32,
)
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import GetSamples, Hello, Manifest, Ping, Refusal
from transport.wire.sample import DTYPE_BYTES, EncodedTensor, VersionSpan

HELLO = Hello(seq=1, schema_version=SCHEMA_VERSION, run_id="r", rank=0, world_size=1, last_committed=0)
FRAMES = {
    "sample": (decode_sample, encode(make_sample(1))),
    "manifest": (decode_manifest, encode(make_batch(1).manifest)),
    "client": (decode_client_message, encode(GetSamples(seq=1, step=2, indices=int32([1, 2, 3])))),
    "hello": (decode_client_message, encode(HELLO)),
    "server": (decode_server_message, encode(Manifest(seq=1, manifest=make_batch(1).manifest))),
}
DTYPES = st.sampled_from(sorted(set(DTYPE_BYTES) - {"bfloat16"})).map(np.dtype)
ARRAYS = DTYPES.flatmap(lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=4, min_side=0)))


def decodes_or_complains(decode, data: bytes) -> None:
    """The only ways out: a value that can be encoded again, or an error of ours."""
    try:
        value = decode(data)
    except (CodecError, SchemaMismatch):
        return
    encode(value)


@given(ARRAYS)
def test_any_array_survives_the_wire(array: np.ndarray) -> None:
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(EncodedTensor.of(array)), type=EncodedTensor)
    decoded.check()
    assert decoded.numpy().shape == array.shape
    assert decoded.numpy().tobytes() == np.ascontiguousarray(array).tobytes()


@given(
    npst.arrays(np.float32, st.integers(1, 200), elements=st.floats(-50, 0, width=32)),
    st.floats(-10, 10),
    st.text(max_size=20),
    st.lists(st.integers(0, 2**40), max_size=4),
)
def test_any_sound_sample_survives_the_wire(
    logprobs: np.ndarray, advantage: float, name: str, versions: list[int]
) -> None:
    spans = tuple(VersionSpan(version, 0, len(logprobs)) for version in versions)
    sample = make_sample(
        1,
        len(logprobs),
        logprobs=EncodedTensor.of(logprobs),
        advantages=advantage,
        env_name=name,
        versions=spans,
        loss_mask=EncodedTensor.of(np.zeros(len(logprobs), bool)),
    )
    decoded = decode_sample(encode_sample(sample))
    assert decoded == sample
    assert decoded.logprobs.numpy().tobytes() == logprobs.tobytes()


def test_decoded_arrays_are_views_of_the_frame() -> None:
    frame = encode(make_sample(1, num_tokens=4096))
    tokens = decode_sample(frame).token_ids.numpy()
    assert not tokens.flags.owndata
    assert not tokens.flags.writeable
    assert np.shares_memory(tokens, np.frombuffer(frame, np.uint8))


def test_foreign_byte_order_is_encoded_little_endian() -> None:
    assert bytes(EncodedTensor.of(np.array([1, 2], dtype=">i4")).data) == b"\1\0\0\0\2\0\0\0"


@pytest.mark.parametrize("kind", FRAMES)
def test_truncated_frames_never_decode(kind: str) -> None:
    decode, frame = FRAMES[kind]
    for size in range(len(frame)):
        with pytest.raises(CodecError):
            decode(frame[:size])


@pytest.mark.parametrize("kind", FRAMES)
@given(data=st.data())
@settings(max_examples=200)
def test_mutated_frames_raise_nothing_but_our_errors(kind: str, data: st.DataObject) -> None:
    decode, frame = FRAMES[kind]
    damaged = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_complains(decode, bytes(damaged))


@pytest.mark.parametrize("kind", FRAMES)
def test_deep_nesting_is_a_codec_error(kind: str) -> None:
    nested = b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(CodecError):
        FRAMES[kind][0](nested)


@pytest.mark.parametrize("kind", FRAMES)
def test_unknown_fields_are_refused(kind: str) -> None:
    decode, frame = FRAMES[kind]
    with pytest.raises(CodecError, match="unknown field"):
        decode(msgspec.msgpack.encode(msgspec.msgpack.decode(frame) | {"surprise": 1}))


@pytest.mark.parametrize(
    "tensor",
    [
        EncodedTensor("float32", (3,), memoryview(b"1234")),
        EncodedTensor("int32", (-1, -1), memoryview(b"1234")),
        EncodedTensor("uint8", (1,) * 65, memoryview(b"1")),
        EncodedTensor("uint8", (0, 2**62, 2**62), memoryview(b"")),
    ],
)
def test_impossible_tensors_are_refused(tensor: EncodedTensor) -> None:
    with pytest.raises(CodecError):
        tensor.check()


def test_dtype_without_a_wire_form_is_refused() -> None:
    with pytest.raises(CodecError, match="complex64"):
        EncodedTensor.of(np.zeros(2, np.complex64))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", EncodedTensor.of(np.zeros(0, np.int32))),
        ("token_ids", EncodedTensor.of(np.zeros((4, 8), np.int32))),
        ("token_ids", EncodedTensor.of(np.zeros(32, np.int64))),
        ("loss_mask", EncodedTensor.of(np.ones(32, bool))),
        ("loss_mask", EncodedTensor("bool", (32,), memoryview(bytes([0]) + bytes([2]) * 31))),
        ("logprobs", EncodedTensor.of(np.zeros(31, np.float32))),
        ("logprobs", EncodedTensor.of(np.full(32, np.nan, np.float32))),
        ("advantages", float("nan")),
        ("advantages", EncodedTensor.of(np.full(32, np.inf, np.float32))),
        ("temperature", 0.0),
        ("reward", float("inf")),
        ("versions", (VersionSpan(0, 5, 5),)),
        ("versions", (VersionSpan(0, 0, 33),)),
        ("versions", (VersionSpan(-1, 0, 3),)),
        ("ce_weights", EncodedTensor.of(np.zeros(3, np.float32))),
        ("mm_token_type_ids", EncodedTensor.of(np.zeros(3, np.uint8))),
        ("mm_kwargs", {"pixels": EncodedTensor("float32", (3,), memoryview(b"1"))}),
    ],
)
def test_unsound_sample_is_refused_on_both_sides_by_field(field: str, value: object) -> None:
    sample = make_sample(1, **{field: value})
    with pytest.raises(CodecError, match=field.removesuffix("s") if field != "mm_kwargs" else "bytes"):
        encode_sample(sample)
    with pytest.raises(CodecError):
        decode_sample(encode(sample))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("lengths", np.zeros(8, np.int32)),
        ("lengths", np.array(3, np.int32)),
        ("loss_tokens", np.full(8, 33, np.int32)),
        ("env_ids", np.full(8, 2, np.int32)),
        ("env_ids", np.full(8, -1, np.int32)),
        ("modalities", np.full(8, 7, np.uint8)),
        ("num_bytes", np.zeros(8, np.int64)),
        ("groups", np.zeros(7, np.int32)),
        ("trajectories", np.zeros(8, np.int64)),
    ],
)
def test_unsound_manifest_is_refused(column: str, value: np.ndarray) -> None:
    manifest = make_batch(1).manifest
    columns = msgspec.structs.replace(manifest.columns, **{column: EncodedTensor.of(value)})
    with pytest.raises(CodecError):
        decode_manifest(encode(msgspec.structs.replace(manifest, columns=columns)))


def test_manifest_with_another_digest_is_corrupt() -> None:
    with pytest.raises(CorruptFrame):
        check_manifest(msgspec.structs.replace(make_batch(1).manifest, digest="0" * 32))


def test_manifest_of_another_version_names_both() -> None:
    other = msgspec.structs.replace(make_batch(1).manifest, schema_version=SCHEMA_VERSION + 1)
    with pytest.raises(SchemaMismatch, match=f"speaks {SCHEMA_VERSION}, the peer {SCHEMA_VERSION + 1}"):
        decode_manifest(encode(other))


def test_greeting_of_a_future_version_is_recognised_though_it_does_not_decode() -> None:
    future = {"kind": "hello", "seq": 7, "schema_version": 9, "run_id": "r", "colour": [1, 2]}
    assert foreign_greeting(msgspec.msgpack.encode(future)) == (7, 9)
    assert foreign_greeting(encode(Refusal(seq=3, schema_version=1, reason="old"))) == (3, 1)


def test_other_messages_are_no_greeting() -> None:
    assert foreign_greeting(encode(HELLO)) is None
    assert foreign_greeting(encode(Ping(seq=1))) is None
    assert foreign_greeting(b"\xc1\xff") is None
