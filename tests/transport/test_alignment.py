"""Bytes lie in memory as they lie in their file, line for line, and are the same bytes."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.samples import RUN, make_batch, make_sample
from transport.alignment import LINE_BYTES, address_of, lead_bytes
from transport.batch import build_batch
from transport.batch_file import BatchFile, file_chunks
from transport.durable import write_durably
from transport.frames_on_demand import FramesOnDemand
from transport.reply_memory import ReplyMemory
from transport.sample import TrainingSample
from transport.tensor import EncodedTensor


def make_image_sample(number: int, num_patches: int) -> TrainingSample:
    pixels = np.full((num_patches, 3), number, np.float32)
    return make_sample(number, mm_kwargs={"pixel_values": EncodedTensor.of(pixels)})


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 48))
def test_lead_is_the_shortest_that_fits(position: int, address: int) -> None:
    lead = lead_bytes(position, address)
    assert 0 <= lead < LINE_BYTES
    assert (address + lead - position) % LINE_BYTES == 0


@pytest.mark.parametrize("position", [0, 12345])
def test_pieces_are_the_frames_whatever_their_sizes(position: int) -> None:
    samples = [make_image_sample(number, size) for number, size in enumerate([40, 90_000, 1, 90_000])]
    frames = FramesOnDemand([samples[0], make_sample(4), *samples[1:], make_sample(5)])
    assert [bytes(piece) for piece in frames.pieces(position)] == list(frames)


def test_a_piece_that_is_kept_is_an_error_and_not_overwritten() -> None:
    pieces = FramesOnDemand([make_image_sample(0, 9), make_image_sample(1, 9)]).pieces(0)
    kept = next(pieces)[1:]
    with pytest.raises(BufferError):
        next(pieces)
    assert len(kept) > 0


def test_frames_are_read_to_where_they_lie_in_the_file(tmp_path: Path) -> None:
    batch, rows = make_batch(1), [5, 0, 1, 2, 7]
    path = tmp_path / "file"
    write_durably(path, file_chunks(batch))
    content, file = path.read_bytes(), BatchFile(path)
    in_reply = file.read(rows, ReplyMemory(1 << 20), check=True)
    for row, alone, in_piece in zip(rows, file.raw_frames(rows), in_reply, strict=True):
        assert alone == in_piece == batch.frames[row]
        position = content.index(batch.frames[row])
        assert (address_of(alone) - position) % LINE_BYTES == 0
        assert (address_of(in_piece) - position) % LINE_BYTES == 0


def test_memory_of_replies_begins_with_a_line() -> None:
    memory = ReplyMemory(max_kept_bytes=1000)
    for num_bytes in (1, 100, 1 << 20):
        view = memory.take(num_bytes)
        assert (len(view), address_of(view) % LINE_BYTES) == (num_bytes, 0)


def test_a_batch_with_images_is_the_same_file_as_its_frames(tmp_path: Path) -> None:
    """Frames on demand are written through one piece of memory, whatever their sizes."""
    samples = [make_image_sample(number, size) for number, size in enumerate([1, 5000, 3, 100_000])]
    batch = build_batch(RUN, 1, [*samples, make_sample(4)])
    assert isinstance(batch.frames, FramesOnDemand)
    write_durably(tmp_path / "file", file_chunks(batch), at_least_bytes=batch.num_bytes)
    assert BatchFile(tmp_path / "file").frames(range(5)) == list(batch.frames)
