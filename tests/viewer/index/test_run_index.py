"""The index: reads what is new, forgets what is gone, survives a damaged cache, and never writes into the run."""

import json
from contextlib import closing
from pathlib import Path

from runtime.run_dir.run_dir import RunDir
from tests.viewer.generated_run import Shape, group_rows, lines, make_run
from viewer.index.run_index import RunIndex


def count(index: RunIndex, table: str) -> int:
    return int(index.select(f"SELECT COUNT(*) AS total FROM {table}")[0]["total"] or 0)


def test_everything_that_was_recorded_is_found(tmp_path: Path) -> None:
    shape = Shape(num_steps=3, num_groups=2, group_size=4)
    with closing(RunIndex(RunDir(make_run(tmp_path / "run", shape)), None)) as index:
        assert index.refresh() == 3 + 3 * 2
        assert count(index, "groups") == 6
        assert count(index, "rollouts") == 3 * (2 * 4 + 1)
        assert count(index, "tokens") == 3 * 2 * 4


def test_only_new_and_changed_files_are_read_again(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path / "run", Shape(num_steps=2, with_tokens=False)))
    with closing(RunIndex(run, None)) as index:
        assert index.refresh() == 2
        assert index.refresh() == 0
        fewer = group_rows(Shape(), 2, 1)
        lines(run.rollouts / "step-00000002.jsonl", fewer)
        lines(run.rollouts / "step-00000003.jsonl", fewer)
        assert index.refresh() == 2
        assert [row["step"] for row in index.select("SELECT step FROM groups WHERE step > 1")] == [2, 3]


def test_a_file_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path / "run", Shape(num_steps=2)))
    with closing(RunIndex(run, None)) as index:
        index.refresh()
        (run.rollouts / "step-00000001.jsonl").unlink()
        (run.token_export / "step-00000002" / "rank-00001.jsonl").unlink()
        index.refresh()
        assert {row["step"] for row in index.select("SELECT step FROM rollouts")} == {2}
        assert index.select("SELECT * FROM tokens WHERE step = 2 AND rank = 1") == []


def test_lines_that_are_no_records_are_skipped(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path / "run", Shape(num_steps=1, with_tokens=False)))
    good = [json.dumps(row) for row in group_rows(Shape(), 2, 1)]
    (run.rollouts / "step-00000002.jsonl").write_text("\n".join(["garbage", "[1]", "{}", *good, '{"env_name": "torn']))
    with closing(RunIndex(run, None)) as index:
        index.refresh()
        assert [row["line"] for row in index.select("SELECT line FROM rollouts WHERE step = 2")] == [3, 4, 5, 6]


def test_an_index_is_kept_and_a_damaged_one_is_built_again(tmp_path: Path) -> None:
    run, cache = RunDir(make_run(tmp_path / "run", Shape(num_steps=2, with_tokens=False))), tmp_path / "cache"
    for expected in (2, 0):
        with closing(RunIndex(run, cache)) as index:
            assert index.refresh() == expected
    next(cache.glob("*.sqlite")).write_bytes(b"this is no database" * 100)
    with closing(RunIndex(run, cache)) as index:
        assert index.refresh() == 2


def test_a_cache_that_cannot_be_made_costs_time_only(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path / "run", Shape(num_steps=1, with_tokens=False)))
    (tmp_path / "file").write_text("")
    with closing(RunIndex(run, tmp_path / "file" / "cache")) as index:
        assert index.refresh() == 1


def test_the_run_directory_is_left_as_it_was(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(num_steps=1))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with closing(RunIndex(RunDir(run), tmp_path / "cache")) as index:
        index.refresh()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
