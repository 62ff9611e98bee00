"""Checkpoints that are written while training goes on."""

from pathlib import Path

import pytest
import torch

from runtime.errors import StorageError
from tests.trainer.shell.tiny import file_size_limit, make_checkpoints, make_tiny
from trainer.progress import Progress


def test_what_is_saved_is_the_state_at_the_begin_whatever_training_does_meanwhile(tmp_path: Path, model_path: Path):
    tiny = make_tiny()
    checkpoints = make_checkpoints(tmp_path, model_path, background=True)
    tiny.step()
    expected = {name: value.clone() for name, value in tiny.state().items()}
    checkpoints.begin(tiny.model, tiny.optimizer, Progress(step=1))
    tiny.step()
    assert checkpoints.saved(wait=True) == 1
    assert checkpoints.saved(wait=True) is None, "the end is told once"
    resumed = make_tiny(seed=1)
    assert make_checkpoints(tmp_path, model_path).resume(resumed.model, resumed.optimizer) == Progress(step=1)
    for name, value in resumed.state().items():
        assert torch.equal(value, expected[name]), name


def test_nothing_is_saved_before_anything_is_begun(tmp_path: Path, model_path: Path):
    assert make_checkpoints(tmp_path, model_path, background=True).saved(wait=True) is None


def test_a_full_disk_fails_the_save_and_the_next_step_is_due(tmp_path: Path, model_path: Path):
    tiny = make_tiny()
    checkpoints = make_checkpoints(tmp_path, model_path, background=True, interval_steps=10)
    with file_size_limit(2_000):
        checkpoints.begin(tiny.model, tiny.optimizer, Progress(step=10))
        assert checkpoints.saved(wait=True) is None
    assert not (tmp_path / "step-00000010").exists(), "what it wrote takes the room that the next one needs"
    assert checkpoints.due(11)
    checkpoints.begin(tiny.model, tiny.optimizer, Progress(step=11))
    assert checkpoints.saved(wait=True) == 11
    assert not checkpoints.due(12)


def test_too_many_failed_saves_in_a_row_end_the_run(tmp_path: Path, model_path: Path):
    tiny = make_tiny()
    checkpoints = make_checkpoints(tmp_path, model_path, background=True, max_failures=2)
    with file_size_limit(2_000):
        checkpoints.begin(tiny.model, tiny.optimizer, Progress(step=1))
        assert checkpoints.saved(wait=True) is None
        checkpoints.begin(tiny.model, tiny.optimizer, Progress(step=2))
        with pytest.raises(StorageError, match="2 checkpoints in a row"):
            checkpoints.saved(wait=True)
