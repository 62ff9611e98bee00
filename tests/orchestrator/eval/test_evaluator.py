"""The evaluator by itself, and beside a whole run on the real transport.

Averages, intervals and pass@k of evaluation rollouts.
"""

import asyncio
import itertools
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.eval import EvalConfig
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.protocol import RolloutRequest
from orchestrator.eval.evaluator import Evaluator, due_version, last_evaluated, result_path, save_result
from orchestrator.eval.stats import Results, eval_metrics, mean_with_margin, pass_at_k, pass_curve
from orchestrator.values.rollout import Rollout, RolloutFailure
from runtime.health.health import Health
from tests.orchestrator.builders import ENV_ERROR, make_rollout
from tests.orchestrator.toys import ToyEnv, make_config, make_engine, run_orchestrator
from tests.support.fakes import FakeTrainer, training
from tests.support.metrics import read_metrics
from tests.support.waiting import until_async
from transport.client.client import BatchClient
from transport.wire.generation import ServedWeights

ENV = {"id": "toy", "name": "exam", "num_examples": 3, "rollouts_per_example": 4, "sampling": {"max_tokens": 6}}


class FakePolicy:
    """A version that a test sets, and whether it is pinned."""

    def __init__(self) -> None:
        self.live = 0
        self.is_pinned = False

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[int]:
        self.is_pinned = True
        try:
            yield self.live
        finally:
            self.is_pinned = False


class EvaluatorBench:
    """An evaluator and what it logged."""

    def __init__(self, folder: Path, env: ToyEnv, policy: FakePolicy | None = None, **changes: object) -> None:
        self.policy = policy or FakePolicy()
        self.health = Health("orchestrator", 60)
        self.logged: dict[int, Mapping[str, float]] = {}
        config = EvalConfig.model_validate({"envs": [ENV], "every_steps": 2, "max_in_flight": 5} | changes)
        self.evaluator = Evaluator(
            config, [env], self.policy, folder, self.health, seed=0, max_steps=4, log=self.logged.__setitem__
        )

    async def until_logged(self, version: int) -> None:
        await until_async(lambda: version in self.logged and not self.policy.is_pinned, 20)

    async def reach(self, *versions: int) -> None:
        """Run to the end while these versions go live, each when the one before has been looked at."""
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.evaluator.run())
            for version in versions:
                self.policy.live = version
                self.evaluator.notify()
                await self.until_logged(version)
            await self.evaluator.finish(running, last_version=max(versions))


class ExamEnv(ToyEnv):
    """Counts how many rollouts run at a time and whether the version was pinned meanwhile."""

    bench: EvaluatorBench
    num_running = 0
    most_running = 0
    pinned: set[bool]
    waits: str = ""

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.pinned.add(self.bench.policy.is_pinned)
        self.waits = self.bench.health.waits
        try:
            return await super().run(request)
        finally:
            self.num_running -= 1


def make_bench(folder: Path, **changes: object) -> tuple[EvaluatorBench, ExamEnv]:
    env = ExamEnv(make_engine(weights=ServedWeights(version=9, digest="")), name="exam")
    env.pinned = set()
    env.bench = bench = EvaluatorBench(folder, env, **changes)
    return bench, env


async def test_every_due_version_is_evaluated_once_while_it_is_pinned(tmp_path: Path) -> None:
    bench, env = make_bench(tmp_path)
    await bench.reach(0, 2, 4)
    assert list(bench.logged) == [0, 2, 4]
    assert len(env.requests) == 3 * 3 * 4
    assert env.pinned == {True}
    assert env.most_running == 5
    assert "the evaluation of version 4" in env.waits
    assert {request.example.example_id for request in env.requests} == {"0", "1", "2"}


async def test_versions_are_compared_with_the_same_seeds(tmp_path: Path) -> None:
    bench, env = make_bench(tmp_path)
    await bench.reach(0, 4)
    seeds = [request.seed for request in env.requests]
    assert seeds[:12] == seeds[12:]
    assert len(set(seeds)) == 12
    assert bench.logged[0] == bench.logged[4], "the toy engine answers by seed alone"


async def test_a_version_that_was_overtaken_is_replaced_by_the_next_live_one(tmp_path: Path) -> None:
    bench, _ = make_bench(tmp_path)
    await bench.reach(3, 4)
    assert list(bench.logged) == [3, 4]


async def test_a_restart_evaluates_only_what_is_not_done(tmp_path: Path) -> None:
    first, _ = make_bench(tmp_path)
    await first.reach(0, 2)
    second, env = make_bench(tmp_path)
    await second.reach(4)
    assert list(second.logged) == [4]
    assert len(env.requests) == 12


async def test_rollouts_of_another_version_are_not_counted(tmp_path: Path) -> None:
    bench, env = make_bench(tmp_path)
    bench.policy.live = 4
    env._engine.weights = ServedWeights(version=3, digest="")  # type: ignore[attr-defined]
    await bench.reach(4)
    assert bench.logged[4] == {"eval_rollouts/exam/finished": 0.0, "eval_rollouts/exam/failed": 12.0}


async def test_what_hangs_is_cut_off_at_the_deadline_and_counted_as_failed(tmp_path: Path) -> None:
    engine = make_engine(latency=lambda request, _: 0.0 if (request.seed or 0) % 2 else 3600.0)
    bench = EvaluatorBench(tmp_path, ToyEnv(engine, name="exam"), timeout_s=0.2, max_in_flight=12)
    await bench.reach(0, 4)
    counts = bench.logged[0]
    assert counts["eval_rollouts/exam/failed"] > 0
    assert counts["eval_rollouts/exam/finished"] + counts["eval_rollouts/exam/failed"] == 12


async def test_an_update_that_holds_up_the_evaluation_does_not_use_up_its_time(tmp_path: Path) -> None:
    class BusyPolicy(FakePolicy):
        """Weights are being applied, for longer than an evaluation may take."""

        @asynccontextmanager
        async def pinned(self) -> AsyncIterator[int]:
            with suppress(TimeoutError):
                async with asyncio.timeout(2.1):
                    await asyncio.Event().wait()
            async with super().pinned() as version:
                yield version

    engine = make_engine(weights=ServedWeights(version=9, digest=""))
    bench = EvaluatorBench(tmp_path, ToyEnv(engine, name="exam"), BusyPolicy(), timeout_s=2.0)
    await bench.reach(4)
    assert bench.logged[4]["eval_rollouts/exam/finished"] > 0


async def test_a_version_that_never_comes_does_not_hold_up_the_end(tmp_path: Path) -> None:
    bench, _ = make_bench(tmp_path, timeout_s=0.05)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        bench.policy.live = 0
        running = tasks.create_task(bench.evaluator.run())
        await bench.until_logged(0)
        await bench.evaluator.finish(running, last_version=4)
    assert list(bench.logged) == [0]


async def test_a_jointly_scored_environment_plays_an_example_in_one_go(tmp_path: Path) -> None:
    env = ToyEnv(make_engine(), name="exam", scores_jointly=True)
    bench = EvaluatorBench(tmp_path, env)
    await bench.reach(0, 4)
    assert len(env.requests) == 2 * 3
    assert all(request.group_size == 4 for request in env.requests)


@pytest.mark.parametrize(("max_in_flight", "most_groups"), [(9, 2), (2, 1)])
async def test_the_rollouts_of_a_joint_group_all_count_as_running(
    tmp_path: Path, max_in_flight: int, most_groups: int
) -> None:
    env = ExamEnv(make_engine(), name="exam", scores_jointly=True)
    env.pinned = set()
    env.bench = bench = EvaluatorBench(tmp_path, env, max_in_flight=max_in_flight)
    await bench.reach(0, 4)
    assert env.most_running == most_groups  # groups of 4
    assert len(env.requests) == 2 * 3


async def test_a_failing_environment_costs_its_rollouts_only(tmp_path: Path) -> None:
    engine = make_engine(weights=ServedWeights(version=9, digest=""))
    env = ToyEnv(engine, name="exam", fault=lambda request: ENV_ERROR if request.index == 0 else None)
    bench = EvaluatorBench(tmp_path, env)
    await bench.reach(4)
    assert bench.logged[4]["eval_rollouts/exam/failed"] == 3
    assert "eval_pass/exam/at_2" in bench.logged[4]
    assert "eval_pass/exam/at_4" not in bench.logged[4]


async def test_a_whole_run_is_evaluated_and_ends(tmp_path: Path) -> None:
    engine = make_engine()
    exam = ToyEnv(engine, name="exam")
    config = make_config(tmp_path, eval={"envs": [ENV], "every_steps": 2, "timeout_s": 20})
    with training(FakeTrainer(config.server.endpoint)) as trainer:
        await run_orchestrator(config, engine, [ToyEnv(engine)], eval_adapters=[exam])
    assert sorted(trainer.batches) == [1, 2, 3, 4]
    assert not exam.is_open
    files = sorted((tmp_path / "toy" / "report").glob("eval-v*.json"))
    versions = [json.loads(path.read_text())["version"] for path in files]
    assert versions[-1] == 4
    assert len(exam.requests) == 12 * len(versions)
    rows = read_metrics(tmp_path / "toy" / "metrics" / "orchestrator.jsonl")
    assert {row["step"] for row in rows if "eval_reward/exam/mean" in row} == set(versions)
    assert len(asyncio.all_tasks()) == 1, "an orphan task is left"


@dataclass
class LeavingTrainer(FakeTrainer):
    """Publishes the last version while the one before is evaluated, and looks what is served when it may leave."""

    engine: ScriptedEngine = field(default_factory=make_engine)
    exam_runs: threading.Event = field(default_factory=threading.Event)
    published_at: float = math.inf
    served_at_the_end: int | None = None

    def _train(self, client: BatchClient) -> None:
        for step in range(client.hello(), 5):
            assert client.manifest(step) is not None
            if step == 4:
                assert self.exam_runs.wait(30)
            client.weights_published(step, f"weights/v{step}", f"digest-{step}")
            client.trained(step)
            self._commit(client, step)
        self.published_at = time.monotonic()
        assert client.manifest(5) is None
        self.served_at_the_end = self.engine.weights.version


async def test_the_trainer_may_leave_only_when_an_evaluation_has_let_the_last_version_in(tmp_path: Path) -> None:
    """It may hold the weights in its memory, and the evaluation takes longer than two updates may."""
    engine = make_engine()
    config = make_config(
        tmp_path,
        eval={"envs": [ENV], "every_steps": 3, "timeout_s": 50, "max_in_flight": 12},
        engines={"update_timeout_s": 0.05},
    )
    trainer = LeavingTrainer(config.server.endpoint, engine=engine)

    class LongExam(ToyEnv):
        async def run(self, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
            if engine.weights.version == 3:
                trainer.exam_runs.set()
                await until_async(
                    lambda: trainer.served_at_the_end or time.monotonic() > trainer.published_at + 0.5, 40
                )
            return await super().run(request)

    with training(trainer):
        await run_orchestrator(config, engine, [ToyEnv(engine)], eval_adapters=[LongExam(engine, name="exam")])
    assert trainer.served_at_the_end == 4


def test_names_of_evaluation_environments_must_differ(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"eval\.envs: names must differ"):
        make_config(tmp_path, eval={"envs": [ENV, ENV]})


def test_multiples_and_the_last_version_are_due() -> None:
    done, due = -1, []
    while (version := due_version(done, every_steps=4, max_steps=10)) is not None:
        due.append(version)
        done = version
    assert due == [0, 4, 8, 10]


@pytest.mark.parametrize(("last_done", "expected"), [(5, 8), (9, 10), (10, None), (11, None)])
def test_versions_that_were_overtaken_are_not_made_up_for(last_done: int, expected: int | None) -> None:
    assert due_version(last_done, every_steps=4, max_steps=10) == expected


def test_a_result_file_is_the_record_of_what_is_done(tmp_path: Path) -> None:
    assert last_evaluated(tmp_path) == -1
    save_result(tmp_path, 4, {"eval_reward/copy/mean": 0.5})
    save_result(tmp_path, 12, {})
    (tmp_path / "eval-v99999999.json.tmp").write_text("torn")
    (tmp_path / "eval-vother.json").write_text("{}")
    assert last_evaluated(tmp_path) == 12
    assert '"eval_reward/copy/mean":0.5' in result_path(tmp_path, 4).read_text()


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
