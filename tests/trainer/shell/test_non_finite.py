import json
from pathlib import Path

import pytest

from runtime.errors import ExitCode
from tests.trainer.shell.recorded import make_batch, make_sample
from tests.trainer.shell.runs import replay, weight_bytes
from trainer.errors import NonFiniteError
from transport.durable import write_durably
from transport.outbox.batch_file import BatchFile, file_chunks
from transport.outbox.outbox import batch_path
from transport.wire.batch import build_batch

HOPELESS = 3e38
"""An advantage so large that two of them do not add up to a finite loss."""


def record(folder: Path, bad_steps: set[int], num_steps: int) -> Path:
    for step in range(1, num_steps + 1):
        batch = make_batch("run", step, scale=HOPELESS if step in bad_steps else 1.0)
        write_durably(batch_path(folder, step), file_chunks(batch))
    return folder


def test_a_non_finite_step_changes_no_weight_and_the_run_goes_on(model_path, tmp_path):
    recording = record(tmp_path, {2}, 3)
    run_dir = replay(model_path, recording, tmp_path, "run", "--weights.keep", "4")
    assert weight_bytes(run_dir, 2) == weight_bytes(run_dir, 1)
    assert weight_bytes(run_dir, 3) != weight_bytes(run_dir, 2)


def test_a_step_that_was_skipped_in_part_says_so(model_path, tmp_path):
    """The warning must not say that no weight was changed: the other mini-batch was trained."""
    samples = [make_sample("run", 1, index, scale=1.0 if index < 4 else HOPELESS) for index in range(8)]
    write_durably(batch_path(tmp_path, 1), file_chunks(build_batch("run", 1, samples)))
    run_dir = replay(model_path, tmp_path, tmp_path, "run", "--mini-batches", "2")
    assert "not finite, 1 of 2 optimizer steps skipped (1 in a row" in (run_dir / "logs" / "trainer.log").read_text()
    assert weight_bytes(run_dir, 1) != weight_bytes(run_dir, 0)


def test_the_batch_of_a_non_finite_step_is_kept_byte_for_byte(model_path, tmp_path):
    recording = record(tmp_path, {2}, 3)
    run_dir = replay(model_path, recording, tmp_path, "run")
    kept = list((run_dir / "non_finite").iterdir())
    assert [path.name for path in kept] == ["step-00000002.batch"]
    assert kept[0].read_bytes() == batch_path(recording, 2).read_bytes()
    assert BatchFile(kept[0]).manifest.step == 2


def test_too_many_in_a_row_end_the_run_at_the_last_good_checkpoint(model_path, tmp_path):
    recording = record(tmp_path, {2, 3}, 4)
    flags = ("--max-non-finite-steps", "2", "--checkpoint.interval-steps", "1")
    with pytest.raises(NonFiniteError, match="not finite for 2 steps in a row, up to 3") as raised:
        replay(model_path, recording, tmp_path, "run", *flags)
    assert raised.value.exit_code == ExitCode.NON_FINITE
    assert json.loads((tmp_path / "run" / "checkpoints" / "newest.json").read_text()) == {"step": 2}
    assert not (tmp_path / "run" / "weights" / "v00000003").exists()


def test_the_count_survives_a_restart(model_path, tmp_path):
    recording = record(tmp_path, {2, 3}, 4)
    flags = ("--max-non-finite-steps", "2", "--checkpoint.interval-steps", "1")
    replay(model_path, recording, tmp_path, "run", "--max-steps", "2", *flags)
    with pytest.raises(NonFiniteError, match="up to 3"):
        replay(model_path, recording, tmp_path, "run", *flags)
