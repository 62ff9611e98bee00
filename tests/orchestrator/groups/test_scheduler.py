"""Scheduler, collector and the border where results come in."""

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from orchestrator.advantages import make_advantage
from orchestrator.batches.assembler import BatchAssembler
from orchestrator.batches.staleness_policy import WaitPolicy
from orchestrator.config.advantage import GrpoAdvantageConfig
from orchestrator.config.envs import EnvConfig
from orchestrator.data.examples import EnvShare, ExampleOrder
from orchestrator.engines.protocol import Availability
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs import protocol
from orchestrator.envs.protocol import EnvAdapter, RolloutRequest, accept
from orchestrator.groups.collector import Collector
from orchestrator.groups.scheduler import EnvRunner, Scheduler
from orchestrator.groups.scoring import FailureGuard, GroupRule, SignalGuard
from orchestrator.records.ledger import Ledger
from orchestrator.values.rollout import FailureReason, Rollout, RolloutFailure
from runtime.health.health import Health
from tests.orchestrator.builders import ENV_ERROR, make_rollout
from tests.orchestrator.toys import ToyEnv
from tests.support.waiting import until_async
from transport.wire.generation import ServedWeights
from transport.wire.ledger import CompletedPositions


class GatedEnv(ToyEnv):
    """Every rollout waits until the gate opens."""

    def __init__(self, engine: ScriptedEngine, *, scores_jointly: bool = False) -> None:
        super().__init__(engine, scores_jointly=scores_jointly)
        self.gate = asyncio.Event()
        self.num_running = 0
        self.num_cancelled = 0

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
        self.num_running += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        return await super().run(request)


class Bench:
    """A scheduler with everything that it needs, and nothing else."""

    def __init__(self, folder: Path, adapter: EnvAdapter, *, max_in_flight: int = 12, group_size: int = 4) -> None:
        self.assembler = BatchAssembler(
            WaitPolicy(8, group_size, max_staleness=2, max_steps=100), next_step=1, done=CompletedPositions()
        )
        self.live = 0
        self.availability = Availability()
        collector = Collector(
            self.assembler,
            Ledger(folder / "ledger.jsonl", CompletedPositions()),
            {"toy": GroupRule(make_advantage(GrpoAdvantageConfig()))},
            FailureGuard(1.0, 10_000),
            SignalGuard(10_000),
            on_final=lambda: None,
        )
        config = EnvConfig(id="toy", group_size=group_size, rollout_timeout_s=0.05)
        self.health = Health("orchestrator", 60)
        self.scheduler = Scheduler(
            {"toy": EnvRunner(config, adapter)},
            ExampleOrder(0, [EnvShare("toy", len(adapter.examples), 1.0)]),
            collector,
            lambda: self.live,
            seed=0,
            health=self.health,
            availability=self.availability,
            max_in_flight=max_in_flight,
        )

    async def run_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(self.scheduler.run())
            await until_async(condition, 20)
            loop.cancel()


async def test_no_more_rollouts_run_than_allowed(tmp_path: Path) -> None:
    env = GatedEnv(ScriptedEngine(16, 0))
    bench = Bench(tmp_path, env, max_in_flight=10)
    seen: list[int] = []

    def is_full() -> bool:
        seen.append(bench.scheduler.in_flight)
        return env.num_running == 8 and "free rollout slot" in bench.health.waits

    await bench.run_until(is_full)
    assert seen[-1] == max(seen) == 8, "10 slots hold two groups of 4"
    assert bench.scheduler.in_flight == 0, "a cancelled rollout gives its slot back"


async def test_cancelling_the_scheduler_cancels_every_rollout(tmp_path: Path) -> None:
    env = GatedEnv(ScriptedEngine(16, 0))
    bench = Bench(tmp_path, env)
    await bench.run_until(lambda: env.num_running == 12)
    assert (env.num_running, env.num_cancelled) == (0, 12)


async def test_a_new_version_lets_waiting_groups_through(tmp_path: Path) -> None:
    engine = ScriptedEngine(16, 0)
    bench = Bench(tmp_path, ToyEnv(engine))

    def waits_for_version_1() -> bool:
        return "policy version 1 from the trainer (0 is live)" in bench.health.waits

    def publish() -> bool:
        if waits_for_version_1():
            engine.weights = ServedWeights(version=1, digest="")
            bench.live = 1
            bench.scheduler.notify()
        return "policy version 2 from the trainer (1 is live)" in bench.health.waits

    await bench.run_until(publish)
    assert len(bench.assembler.complete) == 4
    assert bench.scheduler.waited_for_policy_s > 0


async def test_a_joint_group_is_one_request_and_all_its_slots(tmp_path: Path) -> None:
    env = GatedEnv(ScriptedEngine(16, 0), scores_jointly=True)
    bench = Bench(tmp_path, env, max_in_flight=8)
    await bench.run_until(lambda: env.num_running == 2 and bench.scheduler.in_flight == 8)


async def test_each_failure_is_logged_once_and_the_group_only_counts(tmp_path: Path, log_lines: list[str]) -> None:
    def fail_first(request: RolloutRequest) -> RolloutFailure | None:
        return ENV_ERROR if request.index == 0 else None

    env = ToyEnv(ScriptedEngine(16, 0), fault=fail_first)
    bench = Bench(tmp_path, env)
    await bench.run_until(lambda: len(bench.assembler.complete) >= 1)
    first = env.requests[0].group_id
    failures = [line for line in log_lines if f"{first}#" in line]
    assert failures == [f"WARNING rollout {first}#0 failed: env_error: boom"]
    final = [line for line in log_lines if f"group {first} is final" in line]
    assert len(final) == 1
    assert "3 of 4 rollouts came back" in final[0]
    assert "boom" not in final[0]


async def test_an_adapter_that_raises_costs_its_rollout_only(tmp_path: Path, log_lines: list[str]) -> None:
    def raise_first(request: RolloutRequest) -> RolloutFailure | None:
        if request.index == 0:
            raise ValueError("a bug in the adapter")
        return None

    bench = Bench(tmp_path, ToyEnv(ScriptedEngine(16, 0), fault=raise_first))
    await bench.run_until(lambda: len(bench.assembler.complete) >= 1)
    assert any("env_error: ValueError: a bug in the adapter" in line for line in log_lines)


async def test_an_adapter_that_ignores_its_deadline_is_cut_off(
    tmp_path: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "DEADLINE_GRACE_S", 0.05)
    env = GatedEnv(ScriptedEngine(16, 0))
    bench = Bench(tmp_path, env)
    await bench.run_until(lambda: env.num_cancelled >= 12)
    assert any("env_timeout: no result" in line for line in log_lines)


async def test_nothing_is_dispatched_while_no_engine_is_in_service(tmp_path: Path) -> None:
    env = ToyEnv(ScriptedEngine(16, 0))
    bench = Bench(tmp_path, env)
    bench.availability.lost("http://10.0.0.1:8000 did not answer")
    waits = "scheduler: an engine to come back (http://10.0.0.1:8000 did not answer)"
    await bench.run_until(lambda: bench.health.waits == waits)
    assert env.requests == []
    bench.availability.restored()
    await bench.run_until(lambda: len(bench.assembler.complete) >= 1)


async def test_rollouts_that_an_outage_spoilt_are_run_again_and_are_no_failures(
    tmp_path: Path, log_lines: list[str]
) -> None:
    tries: list[RolloutRequest] = []

    def fault(request: RolloutRequest) -> RolloutFailure | None:
        tries.append(request)
        if len(tries) == 1:
            bench.availability.lost("killed")
        reasons = (FailureReason.ENGINE_ERROR, FailureReason.ENV_TIMEOUT)
        return None if bench.availability.is_open else RolloutFailure(reasons[len(tries) % 2], "no engine")

    def served() -> bool:
        if len(tries) >= 4:
            bench.availability.restored()
        return len(bench.assembler.complete) >= 1

    bench = Bench(tmp_path, ToyEnv(ScriptedEngine(16, 0), fault=fault))
    await bench.run_until(served)
    again = [request for request in tries if (request.group_id, request.index) == (tries[0].group_id, tries[0].index)]
    assert len(again) == 2
    assert again[0] == again[1], "the same seed: the same rollout"
    assert not [line for line in log_lines if "failed" in line]


async def test_a_failure_without_an_outage_stays_one(tmp_path: Path, log_lines: list[str]) -> None:
    def fault(request: RolloutRequest) -> RolloutFailure | None:
        return RolloutFailure(FailureReason.ENGINE_ERROR, "refused") if request.index == 0 else None

    bench = Bench(tmp_path, ToyEnv(ScriptedEngine(16, 0), fault=fault))
    await bench.run_until(lambda: len(bench.assembler.complete) >= 1)
    assert any("engine_error: refused" in line for line in log_lines)


async def test_a_stale_rollout_fails_and_never_ships(tmp_path: Path, log_lines: list[str]) -> None:
    bench = Bench(tmp_path, ToyEnv(ScriptedEngine(16, 0)))
    bench.live = 1
    await bench.run_until(lambda: len([line for line in log_lines if "failed: stale: sampled by" in line]) >= 8)
    assert not bench.assembler.complete


def test_results_of_the_wrong_number_are_all_failures() -> None:
    results = accept([make_rollout()], 3, version=0)
    assert [result.reason for result in results if isinstance(result, RolloutFailure)] == [FailureReason.ENV_ERROR] * 3


def test_a_rollout_of_an_older_policy_than_was_live_is_stale() -> None:
    fresh, old = accept([make_rollout(version=4), make_rollout(version=3)], 2, version=4)
    assert isinstance(fresh, Rollout)
    assert isinstance(old, RolloutFailure)
    assert (old.reason, old.message) == (
        FailureReason.STALE,
        "sampled by policy version 3, but 4 was live at dispatch",
    )


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_a_failure(reward: float) -> None:
    (result,) = accept([make_rollout(reward)], 1, version=0)
    assert isinstance(result, RolloutFailure)
    assert result.reason is FailureReason.INVALID_REWARD


def test_a_rollout_without_a_sampled_token_is_a_failure() -> None:
    (result,) = accept([make_rollout(length=0)], 1, version=0)
    assert isinstance(result, RolloutFailure)
    assert result.reason is FailureReason.ENV_ERROR
    assert "no model was called" in result.message


def test_failures_pass_as_they_are() -> None:
    assert accept([ENV_ERROR], 1, version=9) == [ENV_ERROR]


def test_sound_rollouts_pass_untouched() -> None:
    rollout = msgspec.structs.replace(make_rollout(0.5), is_truncated=True)
    assert accept([rollout], 1, version=0)[0] is rollout
