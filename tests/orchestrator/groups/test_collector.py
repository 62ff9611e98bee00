"""Groups: final as soon as every member is accounted for, whatever the order.

Filters: what stays out of a batch, and when a run without any signal gives up.
"""

import dataclasses
import os
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.advantages import make_advantage
from orchestrator.config.advantage import GrpoAdvantageConfig, PpoAdvantageConfig, ReinforcePpAdvantageConfig
from orchestrator.errors import InvariantError
from orchestrator.groups.collector import GroupBuffer
from orchestrator.groups.scoring import GroupRule, normalise_batch, score
from orchestrator.values.group import (
    JOINT_FAILURE,
    NO_SURVIVORS,
    PARTIAL_GROUP,
    TOO_FEW_SURVIVORS,
    ZERO_SIGNAL,
    FinalGroup,
    GroupKey,
    ScoredGroup,
    Ticket,
)
from orchestrator.values.rollout import FailureReason, Rollout, RolloutFailure
from tests.orchestrator.builders import ENV_ERROR, make_group, make_rollout, make_ticket


@given(data=st.data(), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_interleaved_groups_become_final_with_their_last_member(data: st.DataObject, sizes: list[int]) -> None:
    buffer = GroupBuffer()
    tickets = [make_ticket(seq, size) for seq, size in enumerate(sizes)]
    for ticket in tickets:
        buffer.open(ticket)
    members = [(ticket, index) for ticket in tickets for index in range(ticket.size)]
    left = {ticket.seq: ticket.size for ticket in tickets}
    for ticket, index in data.draw(st.permutations(members)):
        result = ENV_ERROR if data.draw(st.booleans()) else make_rollout(float(index))
        group = buffer.record(ticket.key, index, result)
        left[ticket.seq] -= 1
        assert (group is not None) == (left[ticket.seq] == 0)
        if group is not None:
            _check_members(group, ticket)
    assert len(buffer._open) == 0


def _check_members(group: FinalGroup, ticket: Ticket) -> None:
    assert group.ticket == ticket
    assert len(group.survivors) + len(group.failures) == ticket.size
    assert all(rollout.reward == index for index, rollout in group.survivors)


def test_a_failed_rollout_is_scrapped_alone_when_scored_individually() -> None:
    group = make_group([1.0, ENV_ERROR, 0.0])
    assert group.drop_reason() is None
    assert [index for index, _ in group.survivors] == [0, 2]


def test_a_failed_rollout_drops_a_jointly_scored_group() -> None:
    assert make_group([1.0, ENV_ERROR, 0.0], joint=True).drop_reason() == JOINT_FAILURE
    assert make_group([1.0, 0.5, 0.0], joint=True).drop_reason() is None


@pytest.mark.parametrize("joint", [True, False])
def test_a_group_without_survivors_is_dropped(joint: bool) -> None:
    assert make_group([ENV_ERROR, ENV_ERROR], joint=joint).drop_reason() == NO_SURVIVORS


def test_two_visits_of_one_example_are_two_groups() -> None:
    buffer = GroupBuffer()
    first, second = (Ticket(GroupKey("copy", "0", attempt), attempt, 1, False, 0) for attempt in range(2))
    buffer.open(first)
    buffer.open(second)
    group = buffer.record(second.key, 0, make_rollout(0.25))
    assert group is not None
    assert group.ticket.key.id == "copy/0/1"
    assert len(buffer._open) == 1


@pytest.mark.parametrize("result", [make_rollout(), ENV_ERROR])
def test_a_member_that_is_not_awaited_is_an_error(result: Rollout | RolloutFailure) -> None:
    buffer = GroupBuffer()
    buffer.open(make_ticket(0, size=2))
    buffer.record(GroupKey("copy", "0", 0), 1, result)
    for key, index in ((GroupKey("copy", "0", 0), 1), (GroupKey("copy", "0", 0), 2), (GroupKey("copy", "9", 0), 0)):
        with pytest.raises(InvariantError, match=f"{key.id}#{index}"):
            buffer.record(key, index, result)


def test_a_group_cannot_be_open_twice() -> None:
    buffer = GroupBuffer()
    buffer.open(make_ticket(0))
    with pytest.raises(InvariantError, match="copy/0/0"):
        buffer.open(make_ticket(0))


def test_one_failure_costs_the_group_where_partial_groups_are_dropped() -> None:
    assert make_group([1.0, ENV_ERROR, 0.0]).drop_reason(drops_partial=True) == PARTIAL_GROUP
    assert make_group([1.0, 0.5, 0.0]).drop_reason(drops_partial=True) is None


@pytest.mark.parametrize(("min_survivors", "reason"), [(1, None), (2, None), (3, TOO_FEW_SURVIVORS)])
def test_a_rest_that_is_too_small_is_dropped(min_survivors: int, reason: str | None) -> None:
    assert make_group([1.0, ENV_ERROR, 0.0]).drop_reason(min_survivors=min_survivors) == reason


def test_a_member_that_is_retried_is_still_awaited_and_its_failed_try_is_kept() -> None:
    buffer, key = GroupBuffer(), GroupKey("copy", "0", 0)
    buffer.open(make_ticket(0, size=2))
    buffer.retry(key, 1, ENV_ERROR)
    assert buffer.record(key, 0, make_rollout()) is None
    group = buffer.record(key, 1, make_rollout(0.0))
    assert group is not None
    assert (group.failures, group.failed_tries, group.num_dispatched) == ((), ((1, ENV_ERROR),), 3)


def test_a_member_that_came_back_cannot_be_retried() -> None:
    buffer, key = GroupBuffer(), GroupKey("copy", "0", 0)
    buffer.open(make_ticket(0, size=2))
    buffer.record(key, 0, make_rollout())
    with pytest.raises(InvariantError, match="copy/0/0#0"):
        buffer.retry(key, 0, ENV_ERROR)


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
