"""How far the files of a run have come."""

import json
from pathlib import Path

import pytest

from runtime.doctor.evidence import TAIL_BYTES, read_positions, read_tail
from runtime.run_dir.run_dir import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_empty_run_has_no_positions(run_dir: RunDir) -> None:
    assert read_positions(run_dir) == {}


def test_directory_that_is_not_there_has_no_positions(tmp_path: Path) -> None:
    assert read_positions(RunDir(tmp_path / "absent")) == {}


def test_positions_of_a_run(run_dir: RunDir) -> None:
    for step in (4, 5, 6):
        write(run_dir.outbox / f"step-{step:08d}.batch", "")
    progress = {"run_id": "x", "last_trained": 5, "last_committed": 3, "last_retired": 0, "weights": {"version": 5}}
    write(run_dir.outbox / "progress.json", json.dumps(progress))
    write(run_dir.metrics / "trainer.jsonl", '{"step": 4}\n{"step": 5, "time": 1.5}\n')
    write(run_dir.ledger / "rollouts.jsonl", '{"seq": 1}\n{"seq": 2}\n')
    write(run_dir.checkpoints / "step-00000003" / "manifest.json", "{}")
    write(run_dir.checkpoints / "step-00000006" / "model.bin", "a save that has not ended")
    write(run_dir.weights / "v00000005" / "manifest.json", "{}")
    assert read_positions(run_dir) == {
        "last step of trainer": "5",
        "ledger of rollouts": '{"seq": 2}',
        "batches in the outbox": "4 to 6",
        "last trained step": "5",
        "last committed step": "3",
        "announced version": "5",
        "newest whole checkpoint": "3",
        "newest published version": "5",
    }


def test_torn_and_broken_lines_are_passed_over(run_dir: RunDir) -> None:
    write(run_dir.metrics / "trainer.jsonl", '{"step": 7}\nnot json\n[1]\n{"step": 8')
    write(run_dir.outbox / "progress.json", "{torn")
    assert read_positions(run_dir) == {"last step of trainer": "7"}


def test_only_the_end_of_a_large_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * (3 * TAIL_BYTES) + b"end\xff")
    assert len(read_tail(path)) == TAIL_BYTES
    assert read_tail(path).endswith("end�")
    assert read_tail(tmp_path / "absent") == ""
