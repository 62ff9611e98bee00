"""Which versions are evaluated, over restarts."""

from pathlib import Path

import pytest

from orchestrator.eval.evaluator import due_version, last_evaluated, result_path, save_result


def test_multiples_and_the_last_version_are_due() -> None:
    done, due = -1, []
    while (version := due_version(done, every_steps=4, max_steps=10)) is not None:
        due.append(version)
        done = version
    assert due == [0, 4, 8, 10]


@pytest.mark.parametrize(("last_done", "expected"), [(5, 8), (9, 10), (10, None), (11, None)])
def test_versions_that_were_overtaken_are_not_made_up_for(last_done: int, expected: int | None) -> None:
    assert due_version(last_done, every_steps=4, max_steps=10) == expected


def test_a_result_file_is_the_record_of_what_is_done(tmp_path: Path) -> None:
    assert last_evaluated(tmp_path) == -1
    save_result(tmp_path, 4, {"eval_reward/copy/mean": 0.5})
    save_result(tmp_path, 12, {})
    (tmp_path / "eval-v99999999.json.tmp").write_text("torn")
    (tmp_path / "eval-vother.json").write_text("{}")
    assert last_evaluated(tmp_path) == 12
    assert '"eval_reward/copy/mean":0.5' in result_path(tmp_path, 4).read_text()
