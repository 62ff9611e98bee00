"""Averages, intervals and pass@k of evaluation rollouts."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.eval.stats import Results, eval_metrics, mean_with_margin, pass_at_k, pass_curve
from tests.orchestrator.builders import ENV_ERROR, make_rollout


@given(tries=st.integers(1, 7), data=st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_pass(tries: int, data: st.DataObject) -> None:
    passed = data.draw(st.integers(0, tries))
    k = data.draw(st.integers(1, tries))
    draws = list(itertools.combinations([True] * passed + [False] * (tries - passed), k))
    assert pass_at_k(tries, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_the_pass_curve_uses_only_examples_with_enough_tries() -> None:
    assert pass_curve([(4, 1), (1, 0)]) == {1: 0.125, 2: 0.5, 4: 1.0}
    assert pass_curve([]) == {}


def test_the_interval_is_that_of_the_mean() -> None:
    mean, margin = mean_with_margin([0.0, 1.0, 0.0, 1.0])
    assert mean == 0.5
    assert margin == pytest.approx(1.96 * math.sqrt((1 / 3) / 4))
    assert mean_with_margin([0.7]) == (0.7, None)


def test_an_example_counts_once_however_many_rollouts_it_has() -> None:
    results = {"often": [make_rollout(1.0)] * 9, "once": [make_rollout(0.0)]}
    values = eval_metrics("copy", results, pass_reward=1.0)
    assert values["eval_reward/copy/mean"] == 0.5
    assert values["eval_pass/copy/at_1"] == 0.5
    assert values["eval_length/copy/mean"] == 3.0


def test_failed_rollouts_are_counted_and_left_out() -> None:
    results: Results = {"0": [make_rollout(1.0), ENV_ERROR], "1": [ENV_ERROR, ENV_ERROR]}
    values = eval_metrics("copy", results, pass_reward=1.0)
    assert values["eval_reward/copy/mean"] == 1.0
    assert (values["eval_rollouts/copy/finished"], values["eval_rollouts/copy/failed"]) == (1.0, 3.0)
    assert "eval_pass/copy/at_2" not in values
    assert "eval_reward/copy/ci95" not in values, "one example has no spread"


def test_nothing_finished_is_no_average() -> None:
    assert eval_metrics("copy", {"0": [ENV_ERROR]}, pass_reward=1.0) == {
        "eval_rollouts/copy/finished": 0.0,
        "eval_rollouts/copy/failed": 1.0,
    }
