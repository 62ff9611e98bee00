"""Metrics of a batch: keys, what they count, and what they do not hide.

What `/health` says about backlog, trainer and engines; a frozen engine is seen within five seconds.
"""

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.advantages import make_advantage
from orchestrator.batches.assembler import BatchAssembler
from orchestrator.config.advantage import GrpoAdvantageConfig
from orchestrator.config.engines import EnginesConfig
from orchestrator.engines.http_engine import HttpEngine
from orchestrator.groups.scoring import GroupRule, score
from orchestrator.records.rollout_log import RolloutLog, rollout_log_path, rollout_rows
from orchestrator.report.metrics import StepTimes, step_line, step_metrics
from orchestrator.report.status import EngineWatch, StatusReporter, pipeline_facts, rejection_facts, trainer_facts
from orchestrator.values.group import AssembledBatch, FinalGroup, GroupKey, ScoredGroup, Ticket, staleness
from orchestrator.values.rollout import Rollout, RolloutFailure, TokenWeights
from runtime.health.health import Health
from tests.faults.chaos_proxy import ChaosProxy, Faults
from tests.orchestrator.builders import ENV_ERROR, make_rollout
from tests.orchestrator.engine_server import TOKEN, EngineServer
from tests.support.waiting import until_async
from transport.outbox.outbox import Outbox
from transport.outbox.progress import PublishedWeights
from transport.server.peers import Peer
from transport.server.server import BatchServer
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


NOW = 100.0


def peer(rank: int, silent_s: float = 0.1, *, alive: bool = True) -> Peer:
    return Peer(b"%d" % rank, rank, world_size=2, address="127.0.0.1", last_seen=NOW - silent_s, alive=alive)


@pytest.mark.parametrize(
    ("in_flight", "pending", "num_untrained", "queued", "backlog"),
    [(0, 0, 0, 0, 0), (5, 8, 0, 3, 8), (8, 8, 2, 16, 24), (0, 0, 3, 24, 24)],
)
def test_backlog_is_what_runs_waits_and_lies_untrained(
    in_flight: int, pending: int, num_untrained: int, queued: int, backlog: int
) -> None:
    facts = pipeline_facts(in_flight, pending, num_untrained, batch_size=8)
    assert facts == {
        "in_flight": in_flight,
        "queued": queued,
        "backlog": backlog,
        "untrained_batches": num_untrained,
    }


def test_trainer_that_is_there() -> None:
    facts = trainer_facts([peer(0), peer(1)], NOW)
    assert facts == {"trainer": "connected", "trainer_ranks": 2, "silent_ranks": 0}


def test_silent_rank_is_named_with_its_silence() -> None:
    facts = trainer_facts([peer(0), peer(1, 4.4, alive=False)], NOW)
    assert facts == {"trainer": "rank 1 has been silent for 4 s", "trainer_ranks": 1, "silent_ranks": 1}


def test_what_was_turned_away_is_counted_by_reason() -> None:
    assert rejection_facts({"garbage": 3, "key": 1}) == {"rejected_garbage": 3, "rejected_key": 1}
    assert rejection_facts({}) == {}


def test_no_trainer() -> None:
    assert trainer_facts([], NOW) == {"trainer": "no trainer is connected", "trainer_ranks": 0, "silent_ranks": 0}


async def test_announced_version_counts_as_trained_before_the_report_comes(tmp_path: Path) -> None:
    """Admission may use the version at once: a trainer that froze between the two must not look like a backlog."""
    health = Health("orchestrator", stall_timeout_s=60)
    outbox = Outbox(tmp_path, "run")
    outbox.mark_weights(PublishedWeights(version=2, location="weights/v2", digest="x"))
    async with BatchServer("tcp://127.0.0.1:0", outbox) as server:
        StatusReporter(
            server, BatchAssembler(8, 5, CompletedPositions()), health, in_flight=lambda: 0, batch_size=8
        ).report()
    assert server.last_trained == 0
    assert health.report()["untrained_batches"] == 2


async def test_reporter_shows_facts_and_tells_ranks_what_this_side_waits_for(tmp_path: Path) -> None:
    health = Health("orchestrator", stall_timeout_s=60)
    async with BatchServer("tcp://127.0.0.1:0", Outbox(tmp_path, "run")) as server:
        reporter = StatusReporter(
            server, BatchAssembler(8, 3, CompletedPositions()), health, in_flight=lambda: 4, batch_size=8
        )
        health.waiting_for("groups for batch 3", loop="batcher")
        reporting = asyncio.create_task(reporter.run())
        await asyncio.sleep(0)  # the first report comes at once
        reporting.cancel()
        assert server.waiting_for == "batcher: groups for batch 3"
    report = health.report()
    assert report["untrained_batches"] == 2
    assert report["in_flight"] == 4
    assert report["trainer"] == "no trainer is connected"


NOTICE_S = 5.0


@pytest.fixture
async def server() -> AsyncIterator[EngineServer]:
    server = EngineServer()
    await server.open()
    yield server
    await server.close()


@pytest.fixture
def proxy(server: EngineServer) -> Iterator[ChaosProxy]:
    with ChaosProxy(int(server.url.rsplit(":", 1)[1])) as proxy:
        yield proxy


@pytest.fixture
async def health(proxy: ChaosProxy) -> AsyncIterator[Health]:
    """Of a process that watches an engine behind the proxy."""
    health = Health("orchestrator", stall_timeout_s=60)
    engine = HttpEngine(EnginesConfig(urls=(f"http://127.0.0.1:{proxy.port}",)), TOKEN)
    await engine.start()
    watching = asyncio.create_task(EngineWatch(engine, health).run())
    await until_async(lambda: health.report().get("engines") == "connected", 5.0)
    yield health
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await engine.close()


def is_missed(health: Health) -> bool:
    return "did not answer" in str(health.report()["engines"])


async def test_frozen_engine_is_seen_and_seen_again(health: Health, proxy: ChaosProxy) -> None:
    proxy.faults = Faults(black_hole=True)
    await until_async(lambda: is_missed(health), NOTICE_S)
    assert f"engines: an answer of the engines (http://127.0.0.1:{proxy.port}/health did not answer" in health.waits
    proxy.faults = Faults()
    await until_async(lambda: health.report()["engines"] == "connected", 10.0)
    assert health.waits == ""


async def test_dead_engine_is_seen(health: Health, proxy: ChaosProxy, server: EngineServer) -> None:
    await server.close()
    proxy.cut()
    await until_async(lambda: is_missed(health), NOTICE_S)
    await server.open()
    await until_async(lambda: health.report()["engines"] == "connected", 10.0)


async def test_engine_out_of_service_is_shown_with_the_reason() -> None:
    health = Health("orchestrator", stall_timeout_s=60)
    engine = HttpEngine(EnginesConfig(), TOKEN)
    engine.availability.lost("http://engine is out of memory")
    watching = asyncio.create_task(EngineWatch(engine, health).run())
    await asyncio.sleep(0)
    await until_async(lambda: health.waits == "engines: an answer of the engines (http://engine is out of memory)", 5.0)
    watching.cancel()
