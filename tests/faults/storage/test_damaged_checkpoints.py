"""Rows 12 and 13: checkpoints of a real trainer that the disk refuses, tears, flips and loses."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.errors import ExitCode
from tests.faults.storage.services import Services
from tests.faults.storage.small_disk import SmallDisk, check_whole, valid_checkpoints
from tests.trainer.runs import FakeOrchestrator, arguments, record_batches, weight_bytes
from trainer.checkpoints.manifest import MANIFEST_NAME, find_newest
from trainer.ranks import Ranks

pytestmark = pytest.mark.integration
RUN_ID = "damaged"
NUM_STEPS = 8
TENSORS_NAME = "shard-00001-model-00001-of-00001.safetensors"
ALONE = Ranks(0, 1, torch.device("cpu"))
KEEP = ("--checkpoint.keep", "2", "--weights.keep", "2")
NO_ROOM = 600 << 10
"""Enough for a publish, too little for a checkpoint."""


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_batches(tmp_path_factory.mktemp("recording"), RUN_ID, NUM_STEPS)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeOrchestrator]:
    with FakeOrchestrator(tmp_path / "outbox", RUN_ID) as running:
        yield running


@pytest.fixture(scope="module")
def finished(model_path: Path, recording: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints 6 and 8."""
    folder = tmp_path_factory.mktemp("finished")
    services = Services(folder)
    services.start("trainer", replay(model_path, recording, folder))
    assert services.wait("trainer") == ExitCode.OK, services.output("trainer")
    return folder / RUN_ID


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return shutil.copytree(finished, tmp_path / RUN_ID)


def replay(model: Path, recording: Path, runs: Path) -> list[str]:
    return arguments(model, runs, RUN_ID, "--replay", str(recording), "--checkpoint.interval-steps", "2", *KEEP)


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def checkpoint_files(run: Path, step: int) -> list[Path]:
    return sorted(path for path in (run / "checkpoints" / f"step-{step:08d}").rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", [delete, truncate, flip])
def test_each_file_of_the_newest_checkpoint_in_turn(run: Path, damage, warnings_seen: list[str]) -> None:
    files = checkpoint_files(run, NUM_STEPS)
    names = {path.name for path in files}
    assert {MANIFEST_NAME, "progress.json", "config.json", "tokenizer.json", TENSORS_NAME} <= names
    for path in files:
        whole = path.read_bytes()
        warnings_seen.clear()
        damage(path)
        found = find_newest(run / "checkpoints", RUN_ID, ALONE)
        assert found is not None
        assert found.step == NUM_STEPS - 2
        (warning,) = warnings_seen
        assert warning.startswith(f"skipping checkpoint step-{NUM_STEPS:08d}: ")
        names_it = path.name in warning or (path.name, damage) == (MANIFEST_NAME, flip)  # then it is wrong about others
        assert names_it, f"{warning} does not name {path}"
        path.write_bytes(whole)
    found = find_newest(run / "checkpoints", RUN_ID, ALONE)
    assert found is not None
    assert found.step == NUM_STEPS


def test_a_trainer_goes_on_from_the_checkpoint_before_and_ends_with_the_same_weights(
    run: Path, finished: Path, model_path: Path, recording: Path, services: Services
) -> None:
    flip(run / "checkpoints" / f"step-{NUM_STEPS:08d}" / TENSORS_NAME)
    services.start("trainer", replay(model_path, recording, run.parent))
    assert services.wait("trainer") == ExitCode.OK
    skipped = f"skipping checkpoint step-00000008: {TENSORS_NAME} does not have the hash"
    assert skipped in services.output("trainer")
    assert "resuming after step 6" in services.output("trainer")
    assert valid_checkpoints(run) == [6, 8]
    assert weight_bytes(run, NUM_STEPS) == weight_bytes(finished, NUM_STEPS)


def test_a_trainer_with_no_valid_checkpoint_refuses_to_start_over(
    run: Path, model_path: Path, recording: Path, services: Services
) -> None:
    delete(run / "checkpoints" / "step-00000006" / MANIFEST_NAME)
    truncate(run / "checkpoints" / "step-00000008" / "progress.json")
    before = weight_bytes(run, NUM_STEPS)
    services.start("trainer", replay(model_path, recording, run.parent))
    assert services.wait("trainer") == ExitCode.USAGE
    *_, line = services.output("trainer").splitlines()
    assert line.startswith("trainer: no valid checkpoint in ")
    assert "step-00000008: progress.json has " in line
    assert "step-00000006: no manifest.json: the save did not end" in line
    assert "restore a checkpoint, or move" in line
    assert weight_bytes(run, NUM_STEPS) == before, "nothing was published"


def test_saves_that_the_disk_refuses_are_tried_at_each_step_and_end_the_run_after_three(
    disk: SmallDisk, server: FakeOrchestrator, finished: Path, model_path: Path, services: Services
) -> None:
    link = ("--orchestrator.endpoint", server.endpoint, "--checkpoint.interval-steps", "1", *KEEP)
    command = arguments(model_path, disk.path, RUN_ID, *link)
    run = disk.path / RUN_ID
    services.start("trainer", command)
    server.publish(1, 2)
    services.until(lambda: server.progress == (2, 2))

    disk.fill(NO_ROOM)
    server.publish(3)
    services.until(lambda: "checkpoint 3 failed (1 of 3)" in services.output("trainer"))
    server.publish(4)
    services.until(lambda: "checkpoint 4 failed (2 of 3)" in services.output("trainer"))
    assert server.progress == (4, 2), "trained, and not committed"
    assert valid_checkpoints(run) == [1, 2]
    disk.empty()
    server.publish(5)
    services.until(lambda: server.progress == (5, 5))

    disk.fill(NO_ROOM)
    server.publish(6, 7, 8)
    assert services.wait("trainer") == ExitCode.STORAGE
    assert "3 checkpoints in a row could not be written" in services.output("trainer").splitlines()[-1]
    assert valid_checkpoints(run)[-1] == 5
    check_whole(run)

    disk.empty()
    server.end(NUM_STEPS)
    services.start("trainer", command)
    assert services.wait("trainer") == ExitCode.OK
    assert server.progress == (NUM_STEPS, NUM_STEPS)
    assert weight_bytes(run, NUM_STEPS) == weight_bytes(finished, NUM_STEPS)
