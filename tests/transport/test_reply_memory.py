"""Memory of replies: used again once nobody looks at it, and never before."""

import gc
from pathlib import Path

import pytest

from tests.transport.samples import RUN, make_batch
from transport.batch_file import BatchFile
from transport.errors import OutboxError
from transport.outbox import Outbox, batch_path
from transport.reply_memory import ReplyMemory


def test_memory_is_used_again_when_the_last_slice_is_gone() -> None:
    memory = ReplyMemory(max_kept_bytes=1000)
    view = memory.take(100)
    view[:] = b"a" * 100
    first, second = view[:50], view[50:]
    del view
    gc.collect()
    while_in_use = memory.take(100)
    while_in_use[:] = b"b" * 100
    assert bytes(first) == b"a" * 50
    del first
    assert bytes(second) == b"a" * 50
    del second, while_in_use
    gc.collect()
    assert bytes(memory.take(60)) in (b"a" * 60, b"b" * 60)


def test_memory_that_is_too_small_or_too_large_is_not_used() -> None:
    size = 1 << 20
    memory = ReplyMemory(max_kept_bytes=size)
    memory.take(size)[:] = b"a" * size
    gc.collect()
    assert b"a" not in bytes(memory.take(size + 1))
    gc.collect()
    memory.take(3 * size)[:] = b"b" * 3 * size
    gc.collect()
    assert b"b" not in bytes(memory.take(size))


def test_frames_are_the_same_bytes_in_whatever_memory_was_used_before(tmp_path: Path) -> None:
    outbox, memory = Outbox(tmp_path, RUN), ReplyMemory(max_kept_bytes=1 << 20)
    outbox.put(make_batch(1))
    for rows in ([3, 0, 3], [1], [], list(range(8))):
        assert outbox.read(1, rows, memory, check=True) == outbox.frames(1, rows)
    with pytest.raises(OutboxError, match="has no row 8"):
        outbox.read(1, [8], memory, check=False)


def test_a_file_that_was_cut_short_is_not_filled_up_with_an_older_reply(tmp_path: Path) -> None:
    outbox, memory = Outbox(tmp_path, RUN), ReplyMemory(max_kept_bytes=1 << 20)
    outbox.put(make_batch(1))
    path = batch_path(tmp_path, 1)
    file = BatchFile(path)
    assert len(file.read([7], memory, check=False)) == 1  # the memory now holds all of row 7
    path.write_bytes(path.read_bytes()[:-5])
    gc.collect()
    with pytest.raises(OutboxError, match="torn: row 7 has"):
        file.read([7], memory, check=False)
