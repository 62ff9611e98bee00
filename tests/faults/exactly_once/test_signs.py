"""The signs that kills are aimed at say what they claim, on files as the services write them."""

import json
from pathlib import Path

import pytest

from tests.faults.exactly_once import signs
from tests.faults.exactly_once.signs import RetirementWatch, check_outbox


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in ("outbox", "state", "checkpoints", "weights", "metrics", "config"):
        (tmp_path / name).mkdir()
    return tmp_path


def write(path: Path, **content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def test_state_that_is_ahead_of_the_outbox_is_seen(run: Path) -> None:
    write(run / "state" / "orchestrator.json", step=1)
    assert signs.batch_announced_nowhere(run)
    (run / "outbox" / "step-00000001.batch.tmp").touch()
    assert signs.batch_announced_nowhere(run)
    assert signs.storing_batch(run)
    (run / "outbox" / "step-00000001.batch.tmp").rename(run / "outbox" / "step-00000001.batch")
    assert signs.batch_announced_nowhere(run) is None
    assert signs.storing_batch(run) is None
    assert signs.newest_batch(run)


def test_checkpoints_are_followed_from_folder_to_commit(run: Path) -> None:
    folder = run / "checkpoints" / "step-00000003"
    folder.mkdir()
    assert signs.saving_checkpoint(run)
    assert signs.saved_not_committed(run) is None
    write(folder / "manifest.json")
    assert signs.saving_checkpoint(run) is None
    assert signs.saved_not_committed(run)
    write(run / "outbox" / "progress.json", last_committed=3)
    assert signs.saved_not_committed(run) is None


def test_the_end_is_the_commit_of_the_last_step(run: Path) -> None:
    write(run / "config" / "orchestrator.json", max_steps=3)
    write(run / "outbox" / "progress.json", last_committed=2)
    assert signs.run_over(run) is None
    write(run / "outbox" / "progress.json", last_committed=3)
    assert signs.run_over(run)


def test_a_batch_that_goes_before_its_checkpoint_is_noticed(run: Path) -> None:
    watch = RetirementWatch(run)
    watch.look()
    write(run / "checkpoints" / "step-00000003" / "manifest.json")
    write(run / "outbox" / "progress.json", last_committed=6, last_retired=3)
    watch.look()
    write(run / "outbox" / "progress.json", last_committed=6, last_retired=6)
    with pytest.raises(AssertionError, match="up to 6 are gone, the newest checkpoint is 3"):
        watch.look()


def test_an_outbox_that_lacks_a_kept_batch_is_noticed(run: Path) -> None:
    write(run / "outbox" / "progress.json", last_committed=4, last_retired=2)
    (run / "outbox" / "step-00000004.batch").touch()
    with pytest.raises(AssertionError):
        check_outbox(run, 4)
    (run / "outbox" / "step-00000003.batch").touch()
    check_outbox(run, 4)
