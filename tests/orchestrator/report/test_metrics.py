"""Metrics of a batch: keys, what they count, and what they do not hide."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.advantages import make_advantage
from orchestrator.config.advantage import GrpoAdvantageConfig
from orchestrator.groups.scoring import GroupRule, score
from orchestrator.records.rollout_log import RolloutLog, rollout_log_path, rollout_rows
from orchestrator.report.metrics import StepTimes, step_line, step_metrics
from orchestrator.values.batch import AssembledBatch
from orchestrator.values.group import FinalGroup, GroupKey, ScoredGroup, Ticket
from orchestrator.values.rollout import Rollout, RolloutFailure
from orchestrator.values.staleness import staleness
from orchestrator.values.token_weights import TokenWeights
from tests.orchestrator.builders import ENV_ERROR, make_rollout
from transport.wire.ledger import CompletedPositions

GRPO = GroupRule(make_advantage(GrpoAdvantageConfig(normalize_std=False)))
TIMES = StepTimes(duration_s=2.0, waited_for_policy_s=0.5, waited_for_trainer_s=0.25, in_flight=7, live_version=2)


def group(
    env_name: str,
    seq: int,
    rewards: list[float | RolloutFailure],
    *,
    length: int = 3,
    version: int = 2,
    joint: bool = False,
) -> ScoredGroup:
    results = tuple(
        result
        if isinstance(result, RolloutFailure)
        else make_rollout(result, env_name=env_name, length=length, version=version)
        for result in rewards
    )
    ticket = Ticket(GroupKey(env_name, str(seq), 0), seq, len(results), joint, version)
    return score(FinalGroup(ticket, results), GRPO)


CUT = AssembledBatch(
    step=4,
    groups=(
        group("copy", 0, [0.0, 1.0], length=2, version=1),
        group("copy", 1, [1.0, 1.0], length=10),
        group("race", 2, [1.0, 3.0, ENV_ERROR], length=4),
    ),
    done=CompletedPositions(3),
)


def test_rewards_speak_of_everything_generated_per_env_and_over_all() -> None:
    values = step_metrics(CUT, TIMES)
    assert values["reward/copy/mean"] == pytest.approx(0.75)
    assert values["reward/race/mean"] == pytest.approx(2.0)
    assert values["reward/all/mean"] == pytest.approx(7 / 6)
    assert (values["reward/all/min"], values["reward/all/max"]) == (0.0, 3.0)
    assert values["reward/race/std"] == pytest.approx(1.0)


def test_advantages_and_staleness_speak_of_what_is_trained() -> None:
    values = step_metrics(CUT, TIMES)
    assert (values["advantage/copy/min"], values["advantage/copy/max"]) == (-0.5, 0.5)
    assert sorted(staleness(CUT.step, CUT.groups)) == [1, 1, 2, 2]
    assert (values["staleness/all/mean"], values["staleness/all/max"]) == (1.5, 2.0)


def test_every_environment_has_its_own_numbers() -> None:
    values = step_metrics(CUT, TIMES)
    assert (values["length/race/mean"], values["sampled_length/race/mean"]) == (6.0, 4.0)
    assert (values["sampled_length/all/min"], values["sampled_length/all/max"]) == (2.0, 10.0)
    assert (values["staleness/copy/max"], values["staleness/race/max"]) == (2.0, 1.0)
    for metric in ("reward", "advantage", "length", "sampled_length", "truncated", "staleness"):
        for env in ("all", "copy", "race"):
            assert all(f"{metric}/{env}/{stat}" in values for stat in ("mean", "std", "min", "max")), metric


def test_failed_tries_count_as_failures_of_rollouts_that_were_dispatched() -> None:
    scored = group("copy", 0, [0.0, 1.0])
    retried = dataclasses.replace(scored.group, failed_tries=((1, ENV_ERROR), (1, ENV_ERROR)))
    values = step_metrics(AssembledBatch(1, (score(retried, GRPO),), CompletedPositions(1)), TIMES)
    assert (values["failures/copy/env_error"], values["failures/copy/share"]) == (2.0, 0.5)


def test_rollouts_that_no_policy_sampled_have_no_staleness_and_no_advantage() -> None:
    scored = group("copy", 0, [0.0, 1.0])
    rollouts = tuple(
        replace(r, branches=tuple(replace(b, versions=()) for b in r.branches))
        for r in scored.group.results
        if isinstance(r, Rollout)
    )
    rule = dataclasses.replace(GRPO, weights=TokenWeights(rl=0.0, ce=1.0))
    values = step_metrics(
        AssembledBatch(1, (score(FinalGroup(scored.group.ticket, rollouts), rule),), CompletedPositions(1)), TIMES
    )
    assert values["reward/copy/mean"] == 0.5
    assert not any(key.startswith(("staleness/", "advantage/")) for key in values)


def test_losses_are_counted_by_reason() -> None:
    values = step_metrics(CUT, TIMES)
    assert values["failures/all/env_error"] == values["failures/race/env_error"] == 1
    assert values["failures/all/share"] == pytest.approx(1 / 7)
    assert values["filtered/copy/zero_signal"] == 1
    assert values["filtered/all/share"] == pytest.approx(1 / 3)
    assert "filtered/race/zero_signal" not in values


def test_waste_and_length_bias_compare_trained_with_generated() -> None:
    values = step_metrics(CUT, TIMES)
    assert values["waste/copy/share"] == pytest.approx(20 / 24)
    assert values["waste/all/share"] == pytest.approx(20 / 32)
    assert values["length_bias/copy/ratio"] == pytest.approx(2 / 6)
    assert values["length_bias/race/ratio"] == pytest.approx(1.0)


def test_pipeline_numbers_are_there() -> None:
    values = step_metrics(CUT, TIMES)
    assert values["throughput/all/tokens_per_s"] == pytest.approx(32 / 2)
    assert values["throughput/all/rollouts_per_s"] == pytest.approx(3.0)
    assert (values["batch/all/rollouts"], values["batch/all/groups"]) == (4, 2)
    assert (values["in_flight/all/rollouts"], values["policy/all/version"]) == (7, 2)
    assert (values["time/all/waited_for_policy_s"], values["time/all/waited_for_trainer_s"]) == (0.5, 0.25)


def test_every_key_has_three_parts_and_every_value_is_a_number() -> None:
    envs = {"all", "copy", "race"}
    for key, value in step_metrics(CUT, TIMES).items():
        metric, env, stat = key.split("/")
        assert metric
        assert stat
        assert env in envs, key
        assert math.isfinite(value), key


def test_numbers_of_the_environment_become_metrics() -> None:
    scored = group("copy", 0, [0.0, 1.0])
    rollouts = tuple(replace(r, metrics={"exact": r.reward}) for r in scored.group.results)  # type: ignore[type-var]
    batch = AssembledBatch(1, (score(FinalGroup(scored.group.ticket, rollouts), GRPO),), CompletedPositions(1))  # type: ignore[arg-type]
    assert step_metrics(batch, TIMES)["metric_exact/copy/mean"] == 0.5


def test_a_step_is_one_line_for_people() -> None:
    line = step_line(4, 100, step_metrics(CUT, TIMES))
    assert "\n" not in line
    for text in (
        "step 4/100",
        "reward 1.167",
        "rollouts 4",
        "filtered 33%",
        "failed 14%",
        "staleness 1.50/2",
        "16 tok/s",
    ):
        assert text in line, line


def test_a_batch_in_which_nothing_survived_an_environment_still_has_metrics() -> None:
    batch = AssembledBatch(
        1, (group("copy", 0, [0.0, 1.0]), group("race", 1, [ENV_ERROR, ENV_ERROR])), CompletedPositions(2)
    )
    values = step_metrics(batch, TIMES)
    assert values["failures/race/share"] == 1.0
    assert "reward/race/mean" not in values


def test_saved_rollouts_say_what_became_of_each() -> None:
    rows = list(rollout_rows(CUT))
    assert [row["state"] for row in rows] == [
        *["trained@4"] * 2,
        *["filtered:zero_signal"] * 2,
        *["trained@4"] * 2,
        "failed:env_error",
    ]
    assert rows[0]["trajectory_id"] == "copy/0/0#0"
    assert (rows[0]["advantage"], rows[0]["reward"], rows[0]["num_sampled_tokens"]) == (-0.5, 0.0, 2)
    assert (rows[0]["num_tokens"], rows[0]["oldest_version"], rows[0]["newest_version"]) == (4, 1, 1)
    assert (rows[6]["failure"], rows[6]["message"], rows[6]["advantage"]) == ("env_error", "boom", None)


def test_a_dropped_group_is_saved_without_advantages() -> None:
    batch = AssembledBatch(1, (group("race", 0, [1.0, ENV_ERROR], joint=True),), CompletedPositions(1))
    assert [(row["state"], row["advantage"]) for row in rollout_rows(batch)] == [
        ("filtered:joint_failure", None),
        ("failed:env_error", None),
    ]


def test_rollouts_are_written_whole_and_replaced_when_cut_again(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    log.write(AssembledBatch(4, CUT.groups[:1], CompletedPositions(1)))
    log.write(CUT)
    lines = rollout_log_path(tmp_path, 4).read_text().splitlines()
    assert len(lines) == 7
    assert json.loads(lines[0])["messages"] == [{"role": "user", "content": "hi"}]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004.jsonl"]


def test_messages_that_json_does_not_know_are_written_as_text(tmp_path: Path) -> None:
    strange = replace(make_rollout(), messages=({"role": "tool", "content": Path("/x"), "set": {1}},))
    ticket = Ticket(GroupKey("copy", "0", 0), 0, 1, False, 0)
    RolloutLog(tmp_path).write(AssembledBatch(1, (score(FinalGroup(ticket, (strange,)), GRPO),), CompletedPositions(1)))
    row = json.loads(rollout_log_path(tmp_path, 1).read_text())
    assert row["messages"][0]["content"] == "/x"


def test_a_disk_that_refuses_costs_the_file_not_the_run(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "missing")
    log.write(CUT)
    log.write(CUT)
    assert not (tmp_path / "missing").exists()


def test_saving_can_be_turned_off(tmp_path: Path) -> None:
    RolloutLog(None).write(CUT)
    assert not list(tmp_path.iterdir())
