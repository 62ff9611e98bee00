"""The history of a run with a curriculum, and the shares of what was trained."""

import dataclasses
import json
from pathlib import Path

import pytest

from orchestrator.data.curriculum import Curricula
from orchestrator.errors import StateMismatchError
from orchestrator.records.history import History
from orchestrator.report.selection_bias import SelectionBias, selection_bias, selection_bias_metrics
from orchestrator.values.batch import AssembledBatch
from orchestrator.values.group import ScoredGroup
from tests.orchestrator.builders import ENV_ERROR, make_group, make_rollout
from tests.orchestrator.data.test_curriculum import make_curriculum, scored
from transport.wire.ledger import CompletedPositions


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
    selection = selection_bias(GROUPS)
    assert selection == SelectionBias(
        num_started=8, num_finished=7, num_trained=3, finished_tokens=140, trained_tokens=60, stale_tokens=60
    )
    values = selection_bias_metrics("all", selection)
    assert values == {
        "waste/all/rollout_share": pytest.approx(5 / 8),
        "waste/all/share": pytest.approx(80 / 140),
        "waste/all/stale_share": pytest.approx(60 / 140),
        "length_bias/all/ratio": pytest.approx((60 / 3) / (140 / 7)),
    }


def test_nothing_is_said_of_what_did_not_happen() -> None:
    assert selection_bias_metrics("all", SelectionBias()) == {}
    assert selection_bias_metrics("all", SelectionBias(num_started=4)) == {"waste/all/rollout_share": 1.0}
    assert "length_bias/all/ratio" not in selection_bias_metrics("all", selection_bias([GROUPS[1]]))


def curricula() -> Curricula:
    return Curricula({"toy": make_curriculum(refresh_groups=1)})


def batch(step: int) -> AssembledBatch:
    return AssembledBatch(step, (scored(step - 1, [0.0, 1.0]),), CompletedPositions(step))


def write(path: Path, *steps: int) -> None:
    """As a run does: each group is seen before its batch is cut."""
    known = curricula()
    history = History(path, next_step=1, curricula=known)
    for step in steps:
        for group in batch(step).groups:
            known.saw(group)
        history.write(batch(step))


def test_a_restart_forgets_the_batch_that_did_not_become_durable(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write(path, 1, 2, 3)
    lines = path.read_bytes().splitlines()
    known = curricula()
    restarted = History(path, next_step=3, curricula=known)
    assert known.by_env["toy"].is_ready(3), "a draw that needs the outcomes of batches 1 and 2"
    assert not known.by_env["toy"].is_ready(4), "a draw that needs that of batch 3"
    restarted.write(AssembledBatch(3, (), CompletedPositions(3)))
    assert path.read_bytes().splitlines() == [*lines[:2], b'{"step":3}']
    History(path, next_step=4, curricula=curricula())


def test_a_batch_that_is_written_again_has_one_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write(path, 1, 2, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    History(path, next_step=3, curricula=curricula())


def test_a_torn_line_is_cut_off_and_nonsense_is_named(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write(path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step":2,"les')
    torn = History(path, next_step=2, curricula=curricula())
    torn.write(AssembledBatch(2, (), CompletedPositions(2)))
    assert path.read_bytes() == whole + b'{"step":2}\n'
    path.write_text("nonsense\n")
    with pytest.raises(StateMismatchError, match=r"cannot read the history .*history.jsonl"):
        History(path, next_step=2, curricula=curricula())


def test_the_sums_of_an_earlier_version_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"step":1,"selections":{"toy":{"num_started":8}},"lessons":{}}\n')
    History(path, next_step=2, curricula=curricula())
