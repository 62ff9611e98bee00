"""The guard against failures: when a run gives up, and what it says.

What a failed rollout costs under each policy, in whole runs: real scheduler, ledger, outbox and wire.
"""

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from orchestrator.advantages import make_advantage
from orchestrator.config.advantage import GrpoAdvantageConfig
from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.data.seeds import rollout_seed
from orchestrator.envs.protocol import RolloutRequest, lost_tries
from orchestrator.errors import EnginesLostError, FailureRateError, NoSignalError
from orchestrator.groups.scoring import MIN_GROUPS, FailureGuard, GroupRule, SignalGuard, score
from orchestrator.records.ledger import LEDGER_NAME, read_ledger
from orchestrator.values.group import (
    STALE,
    ZERO_SIGNAL,
    ScoredGroup,
)
from orchestrator.values.rollout import FailureReason, Rollout, RolloutFailure
from runtime.errors import ExitCode
from tests.orchestrator.builders import ENV_ERROR, make_group, make_rollout
from tests.orchestrator.groups.test_collector import scored
from tests.orchestrator.toys import ToyEnv, make_config, make_engine, run_toy
from tests.support.fakes import FakeTrainer
from tests.support.metrics import read_metrics
from transport.wire.generation import GenerateRequest
from transport.wire.ledger import Tally, tally

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


def policy_config(folder: Path, **env: Any) -> OrchestratorConfig:
    return make_config(
        folder, envs=[{"id": "toy", "group_size": 4, "sampling": {"max_tokens": 6}, **env}], max_staleness=0
    )


def ledger_of(folder: Path) -> Tally:
    return tally(read_ledger(folder / "toy" / "ledger" / LEDGER_NAME))


def sizes_of(trainer: FakeTrainer) -> set[int]:
    samples = [sample for batch in trainer.batches.values() for sample in batch]
    return set(Counter(sample.group_id for sample in samples).values())


def fail_third(request: RolloutRequest) -> RolloutFailure | None:
    return RolloutFailure(FailureReason.ENV_ERROR, "on purpose") if request.seed % 3 == 0 else None


async def run(config: OrchestratorConfig, **env: Any) -> tuple[FakeTrainer, ToyEnv]:
    engine = make_engine(latency=lambda request, _: 0.002 * ((request.seed or 0) % 4))
    adapter = ToyEnv(engine, **{"fault": fail_third, **env})
    return await run_toy(config, engine, [adapter]), adapter


async def test_a_retried_rollout_completes_its_group(tmp_path: Path) -> None:
    trainer, env = await run(policy_config(tmp_path, failure_policy="retry", max_tries=12))
    assert sizes_of(trainer) == {4}
    result = ledger_of(tmp_path)
    assert result.balances, result.problems
    assert result.num_dispatched == len(env.requests), "every try is a dispatch"
    assert result.states["failed:env_error"] > 0
    assert not result.states["in_flight"]


async def test_tries_differ_in_their_seed_only(tmp_path: Path) -> None:
    _, env = await run(policy_config(tmp_path, failure_policy="retry", max_tries=12))
    tries: dict[tuple[str, int], list[RolloutRequest]] = {}
    for request in env.requests:
        tries.setdefault((request.group_id, request.index), []).append(request)
    retried = [requests for requests in tries.values() if len(requests) > 1]
    assert retried
    assert all(len({request.seed for request in requests}) == len(requests) for requests in retried)
    assert all(fail_third(request) is not None for requests in retried for request in requests[:-1])


async def test_after_its_last_try_a_failure_costs_the_rollout(tmp_path: Path) -> None:
    def fail_half(request: RolloutRequest) -> RolloutFailure | None:
        return ENV_ERROR if request.seed % 2 == 0 else None

    trainer, env = await run(policy_config(tmp_path, failure_policy="retry", max_tries=2), fault=fail_half)
    assert sizes_of(trainer) & {2, 3}, "no partial group shipped"
    most = Counter((request.group_id, request.index) for request in env.requests).most_common(1)
    assert most[0][1] == 2
    assert ledger_of(tmp_path).balances


async def test_a_dropped_group_is_replaced_by_the_next(tmp_path: Path) -> None:
    trainer, _ = await run(policy_config(tmp_path, failure_policy="drop_group"))
    assert sizes_of(trainer) == {4}
    assert all(len(batch) >= 8 for batch in trainer.batches.values()), "batches are filled up"
    result = ledger_of(tmp_path)
    assert result.balances, result.problems
    assert result.states["failed:env_error"] > 0
    assert result.states["filtered:partial_group"] + result.states["cancelled"] > 0


class HangingSiblings(ToyEnv):
    """Where the first rollout of a group fails, the others never come back by themselves."""

    num_hanging = num_cancelled = most_hanging = 0

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
        first = rollout_seed(0, "toy", request.example.example_id, int(request.group_id.split("/")[-1]), 0)
        if first % 3 or request.index == 0:
            return await super().run(request)
        self.requests.append(request)
        self.num_hanging += 1
        self.most_hanging = max(self.most_hanging, self.num_hanging)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_hanging -= 1
        return []


async def test_a_failure_cancels_the_rest_of_a_dropped_group_at_once(tmp_path: Path, log_lines: list[str]) -> None:
    config = policy_config(tmp_path, failure_policy="drop_group")
    engine = make_engine()
    env = HangingSiblings(engine, fault=lambda request: fail_third(request) if request.index == 0 else None)
    trainer = await run_toy(config, engine, [env])
    assert sizes_of(trainer) == {4}
    assert sorted(trainer.batches) == [1, 2, 3, 4], "slots of cancelled rollouts are free again"
    assert env.num_cancelled > 0
    assert env.num_hanging == 0
    result = ledger_of(tmp_path)
    assert result.balances, result.problems
    assert result.num_dispatched >= len(env.requests), "one that was cancelled before it began was dispatched, too"
    assert result.states["cancelled"] >= env.num_cancelled
    assert result.states["failed:env_error"] > 0
    assert len([line for line in log_lines if "failed: env_error" in line]) == result.states["failed:env_error"]
    assert not [line for line in log_lines if "failed: cancelled" in line and not line.startswith("DEBUG")]
    assert len(asyncio.all_tasks()) == 1, "an orphan task is left"


async def test_a_rest_that_is_too_small_is_not_trained(tmp_path: Path) -> None:
    trainer, _ = await run(policy_config(tmp_path, min_group_size=3))
    assert sizes_of(trainer) == {3, 4}
    result = ledger_of(tmp_path)
    assert result.balances, result.problems
    assert result.states["filtered:too_few_survivors"] > 0


async def test_a_joint_group_is_run_again_as_a_whole(tmp_path: Path, log_lines: list[str]) -> None:
    config = policy_config(tmp_path, failure_policy="retry", max_tries=12)
    trainer, env = await run(config, scores_jointly=True)
    assert sizes_of(trainer) == {4}
    result = ledger_of(tmp_path)
    assert result.balances, result.problems
    assert result.num_dispatched == 4 * len(env.requests)
    assert any("failed and is run again: env_error: on purpose" in line for line in log_lines)


async def test_batches_do_not_depend_on_timing_under_retry(tmp_path: Path) -> None:
    digests = []
    for index, latency_s in enumerate((0.0, 0.01)):

        def latency(request: GenerateRequest, _: int, latency_s: float = latency_s) -> float:
            return latency_s * ((request.seed or 0) % 3)

        engine = make_engine(latency=latency)
        config = policy_config(tmp_path / str(index), failure_policy="retry", max_tries=3)
        digests.append((await run_toy(config, engine, [ToyEnv(engine, fault=fail_third)])).digests)
    assert digests[0] == digests[1]


async def test_each_failed_try_has_its_line_and_the_group_its_counts(tmp_path: Path, log_lines: list[str]) -> None:
    _, env = await run(policy_config(tmp_path, failure_policy="retry", max_tries=2))
    group = next(request.group_id for request in env.requests if fail_third(request))
    failed = [request for request in env.requests if request.group_id == group and fail_third(request)]
    lines = [line for line in log_lines if f"rollout {group}#" in line and "on purpose" in line]
    assert len(lines) == len(failed)
    (final,) = [line for line in log_lines if f"group {group} is final" in line]
    assert f"({len(failed)} env_error)" in final
    assert "on purpose" not in final


async def test_saved_rollouts_and_metrics_count_failed_tries(tmp_path: Path) -> None:
    await run(policy_config(tmp_path, failure_policy="retry", max_tries=12))
    rows = read_metrics(tmp_path / "toy" / "metrics" / "orchestrator.jsonl")
    saved = [
        json.loads(line)
        for path in sorted((tmp_path / "toy" / "rollouts").iterdir())
        for line in path.read_text().splitlines()
    ]
    failed = [row for row in saved if row["state"] == "failed:env_error"]
    assert len(failed) == sum(row.get("failures/toy/env_error") or 0 for row in rows) > 0
    assert all(row["failure"] == "env_error" for row in failed)


def test_siblings_of_a_failed_joint_rollout_are_cancelled_when_all_run_again() -> None:
    lost = lost_tries([make_rollout(), ENV_ERROR])
    assert [failure.reason for failure in lost] == [FailureReason.CANCELLED, FailureReason.ENV_ERROR]
    assert lost_tries([make_rollout(), make_rollout()]) == []
