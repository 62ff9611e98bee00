"""Filters: what stays out of a batch, and when a run without any signal gives up."""

import dataclasses
import os
from collections.abc import Sequence

import msgspec
import pytest

from orchestrator.advantages import make_advantage
from orchestrator.config.advantage import GrpoAdvantageConfig, PpoAdvantageConfig, ReinforcePpAdvantageConfig
from orchestrator.groups.scoring import GroupRule, normalise_batch, score
from orchestrator.values.group import (
    JOINT_FAILURE,
    TOO_FEW_SURVIVORS,
    ZERO_SIGNAL,
    FinalGroup,
    GroupKey,
    ScoredGroup,
    Ticket,
)
from orchestrator.values.rollout import FailureReason, RolloutFailure
from tests.orchestrator.builders import ENV_ERROR, make_group, make_rollout

GRPO = GroupRule(make_advantage(GrpoAdvantageConfig()))


def scored(*results: float | RolloutFailure, joint: bool = False) -> ScoredGroup:
    return score(make_group(results, joint=joint), GRPO)


def test_a_group_that_differs_ships_with_its_survivors() -> None:
    group = scored(0.0, ENV_ERROR, 1.0)
    assert group.filtered is None
    assert [(index, rollout.reward) for index, rollout, _ in group.trainable] == [(0, 0.0), (2, 1.0)]
    assert [advantage for _, _, advantage in group.trainable] == pytest.approx([-1, 1], rel=1e-5)


@pytest.mark.parametrize("rewards", [(0.5, 0.5, 0.5), (1.0,), (0.0, 0.0)])
def test_a_group_without_advantage_is_filtered(rewards: tuple[float, ...]) -> None:
    group = scored(*rewards)
    assert group.filtered == ZERO_SIGNAL
    assert group.num_trainable == 0
    assert group.trainable == ()


def test_a_dropped_group_is_filtered_and_never_scored() -> None:
    group = scored(0.0, ENV_ERROR, 1.0, joint=True)
    assert (group.filtered, group.advantages) == (JOINT_FAILURE, ())


def test_a_rest_below_the_minimum_is_dropped_and_never_scored() -> None:
    group = score(make_group([0.0, ENV_ERROR, 1.0]), dataclasses.replace(GRPO, min_survivors=3))
    assert (group.filtered, group.advantages) == (TOO_FEW_SURVIVORS, ())


def test_rewards_as_they_are_are_never_without_signal() -> None:
    for config in (PpoAdvantageConfig(), ReinforcePpAdvantageConfig(group_baseline=False)):
        group = score(make_group([0.0]), GroupRule(make_advantage(config)))
        assert (group.filtered, group.advantages) == (None, (0.0,))


def batch(*groups: Sequence[float], rules: dict[str, GroupRule]) -> list[tuple[float, ...]]:
    scored_groups = [score(make_group(rewards, seq), rules["copy"]) for seq, rewards in enumerate(groups)]
    return [group.advantages for group in normalise_batch(scored_groups, rules)]


def test_the_second_pass_normalises_over_all_groups_that_ship() -> None:
    rules = {"copy": GroupRule(make_advantage(ReinforcePpAdvantageConfig()))}
    first, filtered, second = batch((0.0, 2.0), (1.0, 1.0), (0.0, 0.0, 3.0), rules=rules)
    values = [*first, *second]
    assert sum(value * value for value in values) / len(values) == pytest.approx(1.0, rel=1e-5)
    assert second[2] == pytest.approx(2 * first[1]), "the scale is the batch's, not the group's"
    assert filtered == (0.0, 0.0)


def test_without_a_group_baseline_the_batch_mean_is_the_baseline() -> None:
    rules = {"copy": GroupRule(make_advantage(ReinforcePpAdvantageConfig(group_baseline=False)))}
    assert batch((1.0, 1.0), (0.0, 0.0), rules=rules) == [
        pytest.approx((1.0, 1.0), rel=1e-5),
        pytest.approx((-1.0, -1.0), rel=1e-5),
    ]


def test_the_second_pass_leaves_other_environments_alone() -> None:
    rules = {"copy": GRPO, "race": GroupRule(make_advantage(ReinforcePpAdvantageConfig()))}
    grpo = score(make_group([0.0, 1.0]), rules["copy"])
    ticket = Ticket(GroupKey("race", "1", 0), 1, 2, False, 0)
    race = score(FinalGroup(ticket, (make_rollout(0.0), make_rollout(10.0))), rules["race"])
    finished = normalise_batch([grpo, race], rules)
    assert finished[0] is grpo
    assert finished[1].advantages == pytest.approx((-1.0, 1.0), rel=1e-5)


def test_any_message_of_a_failure_can_be_written_down() -> None:
    name = os.fsdecode(b"caf\xe9")
    failure = RolloutFailure(FailureReason.ENV_ERROR, f"no such file: {name}{'.' * 5000}")
    assert failure.message.startswith(r"no such file: caf\udce9.")
    assert len(msgspec.json.encode(failure.message)) < 3000
