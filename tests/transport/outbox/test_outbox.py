"""The outbox: whatever `put` promised is there afterwards, byte for byte, also after kill -9 of a real process."""

import errno
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.samples import RUN, make_batch
from transport import durable
from transport.errors import OutboxError
from transport.outbox.outbox import BatchFile, Outbox, batch_path
from transport.outbox.progress import PublishedWeights, ReportedProgress


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "outbox", RUN)


def filled(outbox: Outbox, num_batches: int) -> Outbox:
    for step in range(outbox.next_step, outbox.next_step + num_batches):
        outbox.put(make_batch(step))
    return outbox


def files(outbox: Outbox) -> list[str]:
    return sorted(path.name for path in outbox.directory.glob("step-*"))


def test_rows_come_back_byte_for_byte(outbox: Outbox) -> None:
    batch = make_batch(1)
    outbox.put(batch)
    assert outbox.manifest(1) == batch.manifest
    assert outbox.frames(1, [5, 0, 5]) == [batch.frames[5], batch.frames[0], batch.frames[5]]
    assert outbox.frames(1, []) == []


def test_reading_some_rows_does_not_touch_the_others(outbox: Outbox) -> None:
    batch = make_batch(1)
    outbox.put(batch)
    path = batch_path(outbox.directory, 1)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1  # in the last row
    path.write_bytes(bytes(damaged))
    assert outbox.frames(1, range(7)) == list(batch.frames[:7])
    with pytest.raises(OutboxError, match=rf"{path} is corrupt: row 7"):
        outbox.frames(1, [7])


@pytest.mark.parametrize("size", [0, 100, -5])
def test_file_that_is_cut_short_while_it_is_served_is_named(outbox: Outbox, size: int) -> None:
    outbox.put(make_batch(1))
    path = batch_path(outbox.directory, 1)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(OutboxError, match=str(path)):
        outbox.frames(1, [7])


def test_frames_stay_when_their_file_is_retired(outbox: Outbox) -> None:
    filled(outbox, 2)
    frames = outbox.frames(1, range(8))
    outbox.retire(1)
    outbox.retire(2)
    assert not batch_path(outbox.directory, 1).exists()
    assert frames == list(make_batch(1).frames)


def test_a_new_process_finds_everything(outbox: Outbox) -> None:
    filled(outbox, 3)
    outbox.mark_trained(2)
    outbox.mark_weights(PublishedWeights(version=2, location="/w/2", digest="d"))
    reopened = Outbox(outbox.directory, RUN)
    assert reopened.steps() == [1, 2, 3]
    assert reopened.next_step == 4
    assert reopened.num_untrained == 1
    assert reopened.progress == outbox.progress
    assert reopened.frames(3, range(8)) == list(make_batch(3).frames)


def test_the_same_batch_again_is_a_no_op(outbox: Outbox) -> None:
    filled(outbox, 2)
    before = batch_path(outbox.directory, 1).stat().st_mtime_ns
    outbox.put(make_batch(1))
    assert batch_path(outbox.directory, 1).stat().st_mtime_ns == before
    assert outbox.next_step == 3


def test_another_batch_under_the_same_step_is_an_error(outbox: Outbox) -> None:
    filled(outbox, 1)
    with pytest.raises(OutboxError, match="expects batch 2, got another batch 1"):
        outbox.put(make_batch(1, num_samples=3))


def test_a_gap_is_an_error(outbox: Outbox) -> None:
    with pytest.raises(OutboxError, match="expects batch 1, got another batch 2"):
        outbox.put(make_batch(2))


def test_batch_of_another_run_is_an_error(outbox: Outbox) -> None:
    with pytest.raises(OutboxError, match="another-run"):
        outbox.put(make_batch(1, run_id="another-run"))


def test_commit_retires_what_the_checkpoint_before_contains(outbox: Outbox) -> None:
    filled(outbox, 5)
    outbox.retire(2)
    assert outbox.steps() == [3, 4, 5]
    assert files(outbox) == [f"step-{step:08d}.batch" for step in (1, 2, 3, 4, 5)]
    outbox.retire(4)
    assert outbox.steps() == [5]
    assert files(outbox) == [f"step-{step:08d}.batch" for step in (3, 4, 5)]
    outbox.retire(4)
    assert len(files(outbox)) == 3


def test_batches_of_the_newest_checkpoint_can_still_be_served(outbox: Outbox) -> None:
    filled(outbox, 4)
    outbox.retire(2)
    outbox.retire(4)
    assert outbox.frames(3, [0]) == [make_batch(3).frames[0]]
    with pytest.raises(OutboxError, match="batch 2 was retired"):
        outbox.frames(2, [0])


def test_everything_committed_leaves_the_next_step(outbox: Outbox) -> None:
    filled(outbox, 2)
    outbox.retire(1)
    outbox.retire(2)
    reopened = Outbox(outbox.directory, RUN)
    assert reopened.steps() == []
    assert reopened.next_step == 3
    assert reopened.num_untrained == 0


def test_retired_batches_are_kept_for_replay_when_asked(tmp_path: Path) -> None:
    outbox = filled(Outbox(tmp_path, RUN, keep_retired=True), 2)
    outbox.retire(1)
    outbox.retire(2)
    kept = BatchFile(tmp_path / "retired" / "step-00000001.batch")
    assert kept.batch().frames == make_batch(1).frames


def test_steps_that_were_never_cut_are_neither_trained_nor_committed(outbox: Outbox) -> None:
    filled(outbox, 1)
    for call in (outbox.mark_trained, outbox.retire):
        for step in (0, 2, -3):
            with pytest.raises(OutboxError, match="never cut"):
                call(step)
    with pytest.raises(OutboxError, match="batch 7 does not exist"):
        outbox.manifest(7)


def test_row_outside_the_batch_is_an_error(outbox: Outbox) -> None:
    filled(outbox, 1)
    for row in (8, -1):
        with pytest.raises(OutboxError, match=f"no row {row}"):
            outbox.frames(1, [row])


def test_temporary_files_of_a_killed_writer_are_removed(outbox: Outbox) -> None:
    filled(outbox, 1)
    leftover = outbox.directory / "step-00000002.batch.tmp"
    leftover.write_bytes(b"half a batch")
    assert Outbox(outbox.directory, RUN).next_step == 2
    assert not leftover.exists()


def test_kill_between_recording_a_commit_and_removing_files_is_made_up_for(outbox: Outbox) -> None:
    filled(outbox, 3)
    outbox.retire(1)
    held = {path: path.read_bytes() for path in outbox.directory.glob("step-*")}
    outbox.retire(2)
    for path, data in held.items():
        path.write_bytes(data)
    reopened = Outbox(outbox.directory, RUN)
    assert files(reopened) == ["step-00000002.batch", "step-00000003.batch"]


@pytest.mark.parametrize("size", [0, 5, 23, 24, 100, -1, -50])
def test_torn_file_is_named(outbox: Outbox, size: int) -> None:
    filled(outbox, 2)
    path = batch_path(outbox.directory, 2)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(OutboxError, match=str(path)):
        Outbox(outbox.directory, RUN)


def test_every_damaged_byte_of_the_head_is_noticed(outbox: Outbox) -> None:
    filled(outbox, 1)
    path = batch_path(outbox.directory, 1)
    sound = path.read_bytes()
    head_bytes = len(sound) - make_batch(1).num_bytes
    for position in range(head_bytes):
        damaged = bytearray(sound)
        damaged[position] ^= 0x40
        path.write_bytes(bytes(damaged))
        with pytest.raises(OutboxError, match=str(path)):
            Outbox(outbox.directory, RUN)


def test_file_with_a_tail_is_torn(outbox: Outbox) -> None:
    filled(outbox, 1)
    with batch_path(outbox.directory, 1).open("ab") as file:
        file.write(b"x")
    with pytest.raises(OutboxError, match="torn"):
        Outbox(outbox.directory, RUN)


def test_missing_batch_is_named(outbox: Outbox) -> None:
    filled(outbox, 3)
    batch_path(outbox.directory, 2).unlink()
    with pytest.raises(OutboxError, match=r"step-00000002\.batch is missing"):
        Outbox(outbox.directory, RUN)


def test_batch_under_another_steps_name_is_an_error(outbox: Outbox) -> None:
    filled(outbox, 1)
    batch_path(outbox.directory, 1).rename(batch_path(outbox.directory, 2))
    with pytest.raises(OutboxError, match="holds batch 1"):
        Outbox(outbox.directory, RUN)


def test_outbox_of_another_run_is_refused(outbox: Outbox) -> None:
    filled(outbox, 1)
    with pytest.raises(OutboxError, match="'other'"):
        Outbox(outbox.directory, "other")
    outbox.mark_trained(1)
    batch_path(outbox.directory, 1).unlink()
    with pytest.raises(OutboxError, match=r"progress\.json"):
        Outbox(outbox.directory, "other")


def test_unreadable_progress_is_an_error_that_names_it(outbox: Outbox) -> None:
    (outbox.directory / "progress.json").write_text('{"run_id": 3}')
    with pytest.raises(OutboxError, match=r"progress\.json"):
        Outbox(outbox.directory, RUN)


def test_full_disk_leaves_the_outbox_as_it_was(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(outbox, 1)

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "fsync", no_space)
        with pytest.raises(OutboxError, match="No space left"):
            outbox.put(make_batch(2))
        outbox.mark_trained(1)
        outbox.retire(1)
    assert outbox.next_step == 2
    assert sorted(path.name for path in outbox.directory.iterdir()) == ["step-00000001.batch"]
    assert outbox.progress.last_committed == 1
    filled(outbox, 1)
    outbox.retire(1)  # the disk is back: the repeat is recorded
    assert Outbox(outbox.directory, RUN).progress.last_committed == 1


NUM_KILLS = 10


def run_and_kill(directory: Path, num_lines: int, then_s: float) -> dict[str, int]:
    """Kill a writer `then_s` after it printed `num_lines`; returns the last step it printed for each kind of event."""
    command = [sys.executable, "-m", "tests.transport.outbox.writer", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(num_lines)]
    time.sleep(then_s)  # the instant of the kill, not a wait for anything
    process.kill()
    lines += process.stdout.readlines()
    process.stdout.close()
    process.wait()
    return {line.split()[0]: int(line.split()[1]) for line in lines if line.endswith("\n")}


@pytest.mark.integration
def test_nothing_that_was_promised_is_lost_by_kill_9(tmp_path: Path) -> None:
    instants = random.Random(7)
    promised = {"put": 0, "trained": 0, "committed": 0}
    for _ in range(NUM_KILLS):
        # From the eighth line on there is a commit among them, however slow the machine is.
        printed = run_and_kill(tmp_path, instants.randrange(1, 12), instants.uniform(0.0, 0.02))
        assert printed.pop("open") > promised["put"]
        promised |= printed
        outbox = Outbox(tmp_path, RUN)
        assert outbox.next_step - 1 in (promised["put"], promised["put"] + 1)
        assert outbox.progress.last_trained >= promised["trained"]
        assert outbox.progress.last_committed >= promised["committed"]
        assert not list(tmp_path.glob("*.tmp"))
        for step in outbox.steps():
            expected = make_batch(step, num_samples=4, num_tokens=2000)
            assert outbox.frames(step, range(4)) == list(expected.frames)
    assert promised["committed"] > 0


START = ReportedProgress(run_id="r")

EVENTS = st.lists(st.tuples(st.sampled_from(["trained", "committed"]), st.integers(1, 20)))


def weights(version: int, digest: str = "d") -> PublishedWeights:
    return PublishedWeights(version=version, location=f"/w/{version}", digest=digest)


def apply(progress: ReportedProgress, event: tuple[str, int]) -> ReportedProgress:
    kind, step = event
    return progress.with_trained(step) if kind == "trained" else progress.with_committed(step)


@given(EVENTS)
def test_progress_never_goes_back_and_keeps_its_order(events: list[tuple[str, int]]) -> None:
    progress = START
    for event in events:
        after = apply(progress, event)
        assert after.last_trained >= progress.last_trained
        assert after.last_committed >= progress.last_committed
        assert after.last_retired <= after.last_committed <= after.last_trained
        assert apply(after, event) == after
        progress = after


def test_batches_of_the_newest_checkpoint_are_not_retired() -> None:
    progress = START.with_committed(10)
    assert progress.last_retired == 0
    assert progress.with_committed(20).last_retired == 10
    assert progress.with_committed(20).with_committed(20).last_retired == 10


@given(EVENTS, st.integers(0, 20))
def test_a_fallback_keeps_the_order_and_everything_that_is_not_retired(
    events: list[tuple[str, int]], step: int
) -> None:
    progress = START
    for event in events:
        progress = apply(progress, event)
    after = progress.with_fallback(step)
    assert after.last_retired <= after.last_committed <= progress.last_committed
    assert (after.last_retired, after.last_trained) == (progress.last_retired, progress.last_trained)
    assert after.with_fallback(step) == after


def test_a_checkpoint_that_was_fallen_back_to_keeps_its_batches_until_the_next_but_one() -> None:
    """12 was no good: after the next commit, 10 is still the checkpoint before the newest."""
    progress = START.with_committed(10).with_committed(12).with_fallback(10)
    assert progress.last_committed == 10
    assert progress.with_committed(20).last_retired == 10
    assert progress.with_committed(20).with_committed(30).last_retired == 20


def test_older_weights_are_ignored_and_newer_ones_replace() -> None:
    progress = START.with_weights(weights(3))
    assert progress.with_weights(weights(2)) == progress
    assert progress.with_weights(weights(4)).weights == weights(4)


def test_same_version_with_another_digest_replaces() -> None:
    assert START.with_weights(weights(3)).with_weights(weights(3, "other")).weights == weights(3, "other")


def test_newest_version_at_another_place_replaces_it() -> None:
    """A trainer that serves weights from memory comes back under another address."""
    old = PublishedWeights(version=4, location="zmq:tcp://a:1", digest="d")
    new = PublishedWeights(version=4, location="zmq:tcp://a:2", digest="d")
    assert ReportedProgress(run_id="r").with_weights(old).with_weights(new).weights == new
