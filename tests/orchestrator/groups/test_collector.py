"""Groups: final as soon as every member is accounted for, whatever the order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InvariantError
from orchestrator.groups.collector import GroupBuffer
from orchestrator.values.group import (
    JOINT_FAILURE,
    NO_SURVIVORS,
    PARTIAL_GROUP,
    TOO_FEW_SURVIVORS,
    FinalGroup,
    GroupKey,
    Ticket,
)
from orchestrator.values.rollout import Rollout, RolloutFailure
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
