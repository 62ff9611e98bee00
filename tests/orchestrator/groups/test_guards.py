"""The guard against failures: when a run gives up, and what it says."""

import dataclasses
from random import Random

import pytest

from orchestrator.advantages import make_advantage
from orchestrator.config.advantage import GrpoAdvantageConfig
from orchestrator.errors import EnginesLostError, FailureRateError, NoSignalError
from orchestrator.groups.guards import MIN_GROUPS, FailureGuard, SignalGuard
from orchestrator.groups.scoring import GroupRule, score
from orchestrator.values.group import (
    STALE,
    ZERO_SIGNAL,
    ScoredGroup,
)
from orchestrator.values.rollout import FailureReason, RolloutFailure
from runtime.errors import ExitCode
from tests.orchestrator.builders import ENV_ERROR, make_group
from tests.orchestrator.groups.test_scoring import scored

PARTIAL = GroupRule(make_advantage(GrpoAdvantageConfig()))
DROP_GROUP = dataclasses.replace(PARTIAL, drops_partial=True)
ENGINE_ERROR = RolloutFailure(FailureReason.ENGINE_ERROR, "connection refused")
TIMEOUT = RolloutFailure(FailureReason.ENV_TIMEOUT, "took too long")
CANCELLED = RolloutFailure(FailureReason.CANCELLED, "another rollout of its group failed")


def group(
    *results: float | RolloutFailure, rule: GroupRule = PARTIAL, joint: bool = False, env: str = "copy"
) -> ScoredGroup:
    final = make_group(results, joint=joint)
    ticket = dataclasses.replace(final.ticket, key=final.ticket.key._replace(env_name=env))
    return score(dataclasses.replace(final, ticket=ticket), rule)


def test_the_run_stops_when_an_environment_fails_too_often() -> None:
    guard = FailureGuard(max_error_rate=0.75, window=8)
    guard.saw(group(0.0, 1.0, ENV_ERROR, TIMEOUT))
    with pytest.raises(FailureRateError, match=r"6 of the last 8 .*'copy' failed; .*\(4x\) is env_error: boom"):
        guard.saw(group(ENV_ERROR, ENV_ERROR, ENV_ERROR, TIMEOUT))


def test_failures_of_one_environment_do_not_hide_behind_another() -> None:
    guard = FailureGuard(max_error_rate=1.0, window=4)
    guard.saw(group(ENV_ERROR, ENV_ERROR, env="broken"))
    guard.saw(group(1.0, 0.0, 1.0, 0.0, env="sound"))
    with pytest.raises(FailureRateError, match="'broken'"):
        guard.saw(group(ENV_ERROR, ENV_ERROR, env="broken"))


def test_a_window_that_is_not_full_or_below_the_limit_goes_on() -> None:
    guard = FailureGuard(max_error_rate=1.0, window=4)
    guard.saw(group(ENV_ERROR, ENV_ERROR, ENV_ERROR))
    guard.saw(group(1.0, 0.0))
    guard.saw(group(ENV_ERROR, ENV_ERROR, ENV_ERROR))


@pytest.mark.parametrize(
    ("rule", "joint"),
    [(PARTIAL, True), (DROP_GROUP, False), (dataclasses.replace(PARTIAL, min_survivors=4), False)],
    ids=["scored jointly", "drop_group", "min_group_size"],
)
@pytest.mark.parametrize(("window", "num_groups"), [(12, MIN_GROUPS), (200, 50)])
def test_one_member_that_always_fails_and_costs_every_group_stops_the_run(
    rule: GroupRule, joint: bool, window: int, num_groups: int
) -> None:
    guard = FailureGuard(max_error_rate=1.0, window=window)
    for _ in range(num_groups - 1):
        guard.saw(group(1.0, 0.0, ENV_ERROR, 1.0, rule=rule, joint=joint))
    what = f"{num_groups} of the last {num_groups} groups of env 'copy' were lost .*: in each of them rollout #2 failed"
    with pytest.raises(FailureRateError, match=rf"{what}; .*\({num_groups}x\) is env_error: boom"):
        guard.saw(group(1.0, 0.0, ENV_ERROR, 1.0, rule=rule, joint=joint))


@pytest.mark.parametrize(("size", "error_rate"), [(64, 0.01), (32, 0.02), (16, 0.04), (8, 0.08)])
def test_large_groups_half_of_which_are_lost_by_chance_stop_nothing(size: int, error_rate: float) -> None:
    guard, random = FailureGuard(max_error_rate=0.9, window=200), Random(0)
    for _ in range(1000):
        guard.saw(group(*(ENV_ERROR if random.random() < error_rate else 1.0 for _ in range(size)), joint=True))


def test_a_member_that_costs_only_itself_stops_nothing() -> None:
    guard = FailureGuard(max_error_rate=0.5, window=4)
    for _ in range(20):
        guard.saw(group(1.0, 0.0, ENV_ERROR, 1.0))


def test_groups_without_signal_are_not_lost_to_failures() -> None:
    guard = FailureGuard(max_error_rate=0.5, window=4)
    for _ in range(20):
        guard.saw(group(1.0, 1.0, ENV_ERROR, 1.0))


def test_a_window_smaller_than_a_group_looks_at_its_last_rollouts() -> None:
    guard = FailureGuard(max_error_rate=1.0, window=2)
    guard.saw(group(ENV_ERROR, ENV_ERROR, ENV_ERROR, 1.0))
    with pytest.raises(FailureRateError, match=r"2 of the last 2 rollouts .* failed"):
        guard.saw(group(1.0, 0.0, ENV_ERROR, ENV_ERROR))


def lose(guard: FailureGuard, *groups: ScoredGroup) -> None:
    """These groups, in turn, until the guard has seen enough."""
    for number in range(MIN_GROUPS):
        guard.saw(groups[number % len(groups)])


def test_members_that_take_turns_to_fail_are_not_named() -> None:
    guard = FailureGuard(max_error_rate=1.0, window=4)
    with pytest.raises(FailureRateError, match=rf"lost to failures; the commonest error \({MIN_GROUPS}x\)"):
        lose(guard, group(ENV_ERROR, 1.0, joint=True), group(1.0, ENV_ERROR, joint=True))


def test_lost_groups_are_blamed_on_the_error_that_most_rollouts_had() -> None:
    guard = FailureGuard(max_error_rate=1.0, window=8)
    with pytest.raises(FailureRateError, match=rf"\({2 * MIN_GROUPS}x\) is env_error: boom"):
        lose(guard, group(ENGINE_ERROR, ENV_ERROR, 1.0, ENV_ERROR, 1.0, joint=True))


def test_cancelled_rollouts_are_lost_with_their_group_and_blamed_for_nothing() -> None:
    guard = FailureGuard(max_error_rate=1.0, window=1000)
    for _ in range(499):
        guard.saw(group(CANCELLED, ENV_ERROR, rule=DROP_GROUP))
    with pytest.raises(FailureRateError, match=r"rollout #1 failed; .*\(500x\) is env_error: boom"):
        guard.saw(group(CANCELLED, ENV_ERROR, rule=DROP_GROUP))


def test_tries_count_unless_they_were_cancelled() -> None:
    guard = FailureGuard(max_error_rate=1.0, window=2)
    for _ in range(10):
        guard.saw_try("copy", CANCELLED)
    guard.saw_try("copy", ENV_ERROR)
    with pytest.raises(FailureRateError, match="2 of the last 2 rollouts of env 'copy' failed;"):
        guard.saw_try("copy", ENV_ERROR)


def test_lost_engines_have_their_own_exit_code() -> None:
    guard = FailureGuard(max_error_rate=1.0, window=2)
    with pytest.raises(EnginesLostError, match="connection refused") as caught:
        guard.saw(group(ENGINE_ERROR, ENGINE_ERROR))
    assert caught.value.exit_code == ExitCode.PEER_LOST


def test_the_commonest_error_is_found_although_messages_name_their_rollout() -> None:
    guard = FailureGuard(max_error_rate=1.0, window=5)
    refused = [
        RolloutFailure(FailureReason.ENGINE_ERROR, f"request {number}: connection refused") for number in range(3)
    ]
    with pytest.raises(EnginesLostError, match=r"\(3x\) is engine_error: request \d: connection refused"):
        guard.saw(group(*refused, ENV_ERROR, ENV_ERROR))


def test_the_run_stops_after_too_many_groups_without_signal() -> None:
    guard = SignalGuard(3)
    guard.saw(scored(1.0, 1.0))
    guard.saw(scored(1.0, 0.0))
    for _ in range(2):
        guard.saw(scored(0.0, 0.0))
    guard.saw(scored(ENV_ERROR, ENV_ERROR))
    with pytest.raises(NoSignalError, match=r"last 3 groups.*'copy'.*Raise the temperature"):
        guard.saw(scored(0.0, 0.0))


def test_a_stale_group_shows_that_there_is_a_signal() -> None:
    guard = SignalGuard(3)
    for filtered in (ZERO_SIGNAL, ZERO_SIGNAL, STALE, ZERO_SIGNAL, ZERO_SIGNAL):
        guard.saw(dataclasses.replace(scored(0.0, 0.0), filtered=filtered))
    with pytest.raises(NoSignalError):
        guard.saw(scored(0.0, 0.0))
