"""The history of a run, and the shares that are made of it."""

import dataclasses
from pathlib import Path

import pytest

from orchestrator.curriculum.curricula import Curricula
from orchestrator.errors import StateMismatchError
from orchestrator.filters import ScoredGroup
from orchestrator.history import History
from orchestrator.lineup import Cut
from orchestrator.positions import Done
from orchestrator.selection import Selection, run_metrics, select, selection_metrics
from tests.orchestrator.core.builders import ENV_ERROR, make_group, make_rollout


def group(seq: int, length: int, filtered: str | None = None, *, failed: bool = False) -> ScoredGroup:
    """Two rollouts of `length` sampled tokens, or one and a failure."""
    whole = make_group([0.0, ENV_ERROR] if failed else [0.0, 1.0], seq)
    results = tuple(
        make_rollout(0.0, length=length) if isinstance(result, type(make_rollout())) else result
        for result in whole.results
    )
    final = dataclasses.replace(whole, results=results)
    return ScoredGroup(final, (1.0,) * len(final.survivors), filtered)


GROUPS = (group(0, 10), group(1, 30, "stale"), group(2, 10, "zero_signal"), group(3, 40, failed=True))


def test_waste_counts_tokens_that_finished_and_rollouts_that_started() -> None:
    selection = select(GROUPS)
    assert selection == Selection(
        num_started=8, num_finished=7, num_trained=3, finished_tokens=140, trained_tokens=60, stale_tokens=60
    )
    values = selection_metrics("all", selection)
    assert values == {
        "waste/all/rollout_share": pytest.approx(5 / 8),
        "waste/all/share": pytest.approx(80 / 140),
        "waste/all/stale_share": pytest.approx(60 / 140),
        "length_bias/all/ratio": pytest.approx((60 / 3) / (140 / 7)),
    }


def test_nothing_is_said_of_what_did_not_happen() -> None:
    assert selection_metrics("all", Selection()) == {}
    assert selection_metrics("all", Selection(num_started=4)) == {"waste/all/rollout_share": 1.0}
    assert "length_bias/all/ratio" not in selection_metrics("all", select([GROUPS[1]]))


def test_the_run_is_the_sum_of_its_steps_and_environments() -> None:
    values = run_metrics({"copy": select(GROUPS[:2]), "race": select(GROUPS[2:])})
    assert values["waste/all/run_share"] == pytest.approx(80 / 140)
    assert values["waste/copy/run_stale_share"] == pytest.approx(60 / 80)
    assert values["length_bias/race/run_ratio"] == pytest.approx(40 / (60 / 3))


def cut(step: int) -> Cut:
    return Cut(step, GROUPS, Done(step))


def test_a_restart_forgets_the_batch_that_did_not_become_durable(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    killed = History(path, next_step=1, curricula=Curricula())
    for step in (1, 2, 3):
        killed.write(cut(step))
    restarted = History(path, next_step=3, curricula=Curricula())
    assert restarted.totals == {"copy": select(GROUPS) + select(GROUPS)}
    restarted.write(Cut(3, (), Done(3)))
    assert len(path.read_bytes().splitlines()) == 3
    assert History(path, next_step=4, curricula=Curricula()).totals == restarted.totals


def test_a_batch_that_is_written_again_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path, next_step=1, curricula=Curricula())
    for step in (1, 2, 2):
        history.write(cut(step))
    assert (
        history.totals
        == History(path, next_step=3, curricula=Curricula()).totals
        == {"copy": select(GROUPS) + select(GROUPS)}
    )


def test_a_torn_line_is_cut_off_and_nonsense_is_named(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    History(path, next_step=1, curricula=Curricula()).write(cut(1))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step":2,"sel')
    torn = History(path, next_step=2, curricula=Curricula())
    torn.write(Cut(2, (), Done(2)))
    assert path.read_bytes() == whole + b'{"step":2}\n'
    path.write_text("nonsense\n")
    with pytest.raises(StateMismatchError, match=r"cannot read the history .*history.jsonl"):
        History(path, next_step=2, curricula=Curricula())
