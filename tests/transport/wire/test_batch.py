"""`CompletedPositions`, a cursor with holes, against a plain set."""

import itertools
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.samples import RUN, make_batch, make_sample
from transport.errors import CodecError, CorruptFrame
from transport.outbox.outbox import Outbox
from transport.wire.codec import build_batch, decode_batch, decode_rows, encode
from transport.wire.ledger import CompletedPositions
from transport.wire.manifest import IMAGE, TEXT
from transport.wire.sample import EncodedTensor, TrainingSample


def test_samples_come_back_equal() -> None:
    samples = [make_sample(number) for number in range(5)]
    decoded = decode_batch(build_batch(RUN, 1, samples))
    for before, after in zip(samples, decoded, strict=True):
        assert encode(before) == encode(after)
        np.testing.assert_array_equal(before.token_ids.numpy(), after.token_ids.numpy())


def test_columns_describe_every_sample() -> None:
    image = make_sample(3, mm_kwargs={"pixel_values": EncodedTensor.of(np.ones((2, 3), np.float32))})
    plain = make_sample(2, num_tokens=7, versions=())
    batch = build_batch(RUN, 4, [image, plain])
    columns = batch.manifest.columns
    assert columns.lengths.numpy().tolist() == [32, 7]
    assert columns.loss_tokens.numpy().tolist() == [24, 6]
    assert columns.modalities.numpy().tolist() == [IMAGE, TEXT]
    assert columns.oldest_versions.numpy().tolist() == [0, -1]
    assert columns.num_bytes.numpy().tolist() == [len(frame) for frame in batch.frames]
    assert batch.num_bytes == sum(len(frame) for frame in batch.frames)


def with_pixels(number: int) -> TrainingSample:
    pixels = np.full((400, 600), number, np.float32)
    return make_sample(number, mm_kwargs={"pixel_values": EncodedTensor.of(pixels)})


def test_a_batch_with_images_holds_no_second_copy_of_its_pixels(tmp_path: Path) -> None:
    samples = [with_pixels(number) for number in range(8)]
    tracemalloc.start()
    try:
        batch = build_batch(RUN, 1, samples)
        Outbox(tmp_path, RUN).put(batch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert batch.num_bytes > 8 * 960_000
    assert peak < 4 * 960_000  # two frames, and the room that one of them grows in


def test_frames_with_images_are_the_same_whenever_they_are_looked_at(tmp_path: Path) -> None:
    samples = [with_pixels(1), make_sample(2), with_pixels(3)]
    batch = build_batch(RUN, 1, samples)
    assert [encode(sample) for sample in samples] == list(batch.frames)
    assert list(batch.frames[1:]) == [encode(sample) for sample in samples[1:]]
    assert len(batch.frames) == 3
    outbox = Outbox(tmp_path, RUN)
    outbox.put(batch)
    assert outbox.frames(1, [2, 0]) == [batch.frames[2], batch.frames[0]]
    assert [encode(sample) for sample in decode_batch(batch)] == list(batch.frames)


def test_ids_are_numbered_by_first_appearance() -> None:
    samples = [make_sample(number) for number in (5, 2, 5, 3)]
    batch = build_batch(RUN, 1, samples)
    assert batch.manifest.env_names == ("env-1", "env-0")
    assert batch.manifest.columns.env_ids.numpy().tolist() == [0, 1, 0, 0]
    assert batch.manifest.columns.groups.numpy().tolist() == [0, 1, 0, 2]
    assert batch.manifest.columns.trajectories.numpy().tolist() == [0, 1, 0, 2]


def test_equal_samples_give_equal_bytes_and_other_samples_another_digest() -> None:
    assert encode(make_batch(1).manifest) == encode(make_batch(1).manifest)
    assert make_batch(1).frames == make_batch(1).frames
    assert make_batch(1).manifest.digest != make_batch(2).manifest.digest


def test_plain_sample_costs_at_most_twelve_bytes_per_token() -> None:
    batch = make_batch(1, num_samples=16, num_tokens=1024)
    assert batch.num_bytes / (16 * 1024) <= 12


def test_empty_batch_and_foreign_sample_are_refused() -> None:
    with pytest.raises(CodecError, match="no samples"):
        build_batch(RUN, 1, [])
    with pytest.raises(CodecError, match="does not belong to run"):
        build_batch(RUN, 1, [make_sample(1, run_id="another")])


def test_step_below_one_is_refused() -> None:
    with pytest.raises(CodecError, match="at least 1"):
        build_batch(RUN, 0, [make_sample(1)])


def test_every_flipped_bit_of_a_frame_is_noticed() -> None:
    batch = make_batch(1, num_samples=1)
    frame = batch.frames[0]
    for position in range(0, len(frame), 7):
        damaged = bytearray(frame)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(CorruptFrame):
            decode_rows(batch.manifest, [0], [bytes(damaged)])


def test_frames_of_the_wrong_rows_are_noticed() -> None:
    batch = make_batch(1)
    with pytest.raises(CorruptFrame):
        decode_rows(batch.manifest, [0, 1], [batch.frames[1], batch.frames[0]])
    with pytest.raises(CodecError, match="1 frames came for 2 rows"):
        decode_rows(batch.manifest, [0, 1], batch.frames[:1])


def test_batch_that_mixes_runs_is_not_decoded() -> None:
    """As a server that is not ours could send it: the frames are sound, and of another run than the manifest."""
    batch = make_batch(1)
    renamed = msgspec.structs.replace(batch.manifest, run_id="another")
    with pytest.raises(CodecError, match="is of run"):
        decode_rows(renamed, range(batch.manifest.num_samples), batch.frames)


seqs = st.lists(st.lists(st.integers(0, 60), max_size=12), max_size=6)


@given(batches=seqs, probe=st.integers(0, 70))
def test_it_is_a_set_of_positions(batches: list[list[int]], probe: int) -> None:
    done, model = CompletedPositions(), set[int]()
    for batch in batches:
        done = done.add(batch)
        model |= set(batch)
    assert {seq for seq in range(70) if seq in done} == model
    assert done.next_open(probe) == next(seq for seq in range(probe, 200) if seq not in model)
    assert done.cursor == next(seq for seq in range(200) if seq not in model)


@given(batches=seqs)
def test_its_spans_are_sorted_apart_and_beyond_the_cursor(batches: list[list[int]]) -> None:
    done = CompletedPositions()
    for batch in batches:
        done = done.add(batch)
    ends = [(0, done.cursor), *done.beyond]
    assert all(end < first for (_, end), (first, _) in itertools.pairwise(ends))
    assert all(first < end for first, end in done.beyond)


@given(batches=seqs)
def test_the_order_of_adding_does_not_matter(batches: list[list[int]]) -> None:
    one_by_one = CompletedPositions()
    for batch in reversed(batches):
        for seq in batch:
            one_by_one = one_by_one.add([seq])
    assert one_by_one == CompletedPositions().add(seq for batch in batches for seq in batch)


def test_it_survives_json() -> None:
    done = CompletedPositions(3, ((5, 7), (9, 10)))
    assert msgspec.json.decode(msgspec.json.encode(done), type=CompletedPositions) == done
