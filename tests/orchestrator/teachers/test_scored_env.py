"""Algorithms beyond plain reinforcement, in whole runs: real teacher server, scheduler, outbox and wire."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat.trajectory import Branch
from orchestrator.advantages import make_advantage
from orchestrator.config.advantage import GrpoAdvantageConfig
from orchestrator.config.algorithm import OpdAlgorithmConfig, RlAlgorithmConfig, SftAlgorithmConfig
from orchestrator.config.envs import EnvConfig
from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.engines.protocol import Engine, Generator
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.protocol import EnvAdapter
from orchestrator.groups.scoring import GroupRule, score
from orchestrator.records.ledger import LEDGER_NAME, read_ledger
from orchestrator.teachers.scored_env import AnyTeacher, ScoredEnv, load_envs, make_teachers
from orchestrator.values.group import ZERO_SIGNAL, FinalGroup
from orchestrator.values.rollout import PLAIN_RL, Rollout, TokenWeights, token_weights
from runtime.errors import PeerLostError, find_service_error
from tests.orchestrator.builders import make_group, make_rollout, make_ticket
from tests.orchestrator.engine_server import EngineServer, serving
from tests.orchestrator.toys import ToyEnv, make_config, make_engine, run_orchestrator, run_toy
from tests.support.fakes import FakeTrainer
from tests.support.metrics import read_metrics
from transport.wire.generation import ScoreReply, ScoreRequest
from transport.wire.ledger import tally
from transport.wire.sample import EncodedTensor, TrainingSample

GRPO = make_advantage(GrpoAdvantageConfig())


def scores(request: ScoreRequest) -> ScoreReply:
    values = -request.token_ids.numpy().astype(np.float32)
    values[0] = 0
    return ScoreReply(request_id=request.request_id, logprobs=EncodedTensor.of(values), version=0)


def teacher_server() -> EngineServer:
    return EngineServer(engine=ScriptedEngine(16, 0), vocab_size=16, scores=scores)


def config_of(folder: Path, server: EngineServer, algorithm: dict[str, Any], **changes: Any) -> OrchestratorConfig:
    envs = [{"id": "toy", "group_size": 1, "sampling": {"max_tokens": 6}, "algorithm": algorithm}]
    teachers = {"big": {"url": server.url, "start_timeout_s": 1.0}}
    return make_config(folder, **{"envs": envs, "teachers": teachers, **changes})


def load_toys(config: OrchestratorConfig, engine: Engine) -> tuple[list[EnvAdapter], list[AnyTeacher]]:
    def load(env: EnvConfig, generator: Generator) -> EnvAdapter:
        return ToyEnv(generator, name=env.label)  # type: ignore[arg-type]

    teachers = make_teachers(config, 16)
    return load_envs(config, engine, teachers, load), list(teachers.values())


async def run(config: OrchestratorConfig) -> tuple[FakeTrainer, list[TrainingSample]]:
    engine = make_engine()
    trainer = await run_toy(config, engine, *load_toys(config, engine))
    result = tally(read_ledger(config.run.path / "ledger" / LEDGER_NAME))
    assert result.balances, result.problems
    return trainer, [sample for batch in trainer.batches.values() for sample in batch]


async def test_imitation_trains_on_what_the_teacher_played(tmp_path: Path) -> None:
    async with serving(teacher_server()) as server:
        trainer, samples = await run(config_of(tmp_path, server, {"type": "sft", "teacher": "big"}))
        assert server.num_generate >= len(samples)
    assert all(len(batch) == 8 for batch in trainer.batches.values()), "groups of one ship, whatever their reward"
    for sample in samples:
        assert (sample.versions, sample.temperature, sample.advantages) == ((), 1.0, 0.0)
        assert sample.ce_weights is not None
        np.testing.assert_array_equal(sample.ce_weights.numpy(), sample.loss_mask.numpy().astype(np.float32))
        assert sample.rl_weights is not None
        assert not sample.rl_weights.numpy().any()
    rows = read_metrics(tmp_path / "toy" / "metrics" / "orchestrator.jsonl")
    assert rows[-1]["reward/toy/mean"] is not None
    assert not any(key.startswith(("advantage/", "staleness/")) for row in rows for key in row)


async def test_distillation_trains_on_the_policys_rollouts_with_the_teachers_view(tmp_path: Path) -> None:
    async with serving(teacher_server()) as server:
        _, samples = await run(config_of(tmp_path, server, {"type": "opd", "teacher": "big"}))
    assert samples
    for sample in samples:
        assert sample.versions
        assert sample.ref_logprobs is not None
        assert sample.ref_kl_weights is not None
        mask = sample.loss_mask.numpy()
        np.testing.assert_array_equal(sample.ref_kl_weights.numpy(), mask.astype(np.float32))
        np.testing.assert_array_equal(sample.ref_logprobs.numpy(), np.where(mask, -sample.token_ids.numpy(), 0))


async def test_environments_of_one_run_may_learn_differently(tmp_path: Path) -> None:
    envs = [
        {"id": "toy", "name": "rl", "group_size": 4},
        {"id": "toy", "name": "sft", "group_size": 1, "algorithm": {"type": "sft", "teacher": "big"}},
        {"id": "toy", "name": "opd", "group_size": 2, "algorithm": {"type": "opd", "teacher": "big"}},
    ]
    async with serving(teacher_server()) as server:
        config = config_of(tmp_path, server, {}, envs=envs, max_steps=6, batch_size=12)
        adapters, teachers = load_toys(config, make_engine())
        assert [type(adapter) for adapter in adapters] == [ToyEnv, ToyEnv, ScoredEnv]
        assert len(teachers) == 1, "it is shared"
        _, samples = await run(config)
    by_env = {name: [sample for sample in samples if sample.env_name == name] for name in ("rl", "sft", "opd")}
    assert all(by_env.values())
    assert all(sample.rl_weights is None for sample in by_env["rl"])
    assert all(sample.ce_weights is not None for sample in by_env["sft"])
    assert all(sample.ref_kl_weights is not None for sample in by_env["opd"])


@pytest.mark.parametrize("algorithm", ["sft", "opd"])
async def test_a_teacher_that_is_not_there_ends_the_run_before_it_begins(tmp_path: Path, algorithm: str) -> None:
    server = teacher_server()
    async with serving(server):
        pass
    engine = make_engine()
    config = config_of(tmp_path, server, {"type": algorithm, "teacher": "big"})
    adapters, teachers = load_toys(config, engine)
    with pytest.raises(BaseExceptionGroup) as caught:
        await run_orchestrator(config, engine, adapters, teachers=teachers)
    error = find_service_error(caught.value)
    assert isinstance(error, PeerLostError)
    assert server.url in str(error)
    assert engine.num_requests == 0
    assert len(asyncio.all_tasks()) == 1, "an orphan task is left"


def test_the_config_names_the_weights() -> None:
    assert token_weights(RlAlgorithmConfig()) == PLAIN_RL
    assert token_weights(SftAlgorithmConfig(teacher="t", weight=2.0)) == TokenWeights(rl=0.0, ce=2.0)
    assert token_weights(OpdAlgorithmConfig(teacher="t", rl_weight=0.5)) == TokenWeights(rl=0.5, ref_kl=1.0)
    assert token_weights(RlAlgorithmConfig(observation_weight=0.1)).observation == 0.1


def two_turn_rollout(reward: float, observed: Sequence[bool]) -> Rollout:
    branch = Branch(
        token_ids=np.arange(4, dtype=np.int32),
        sampled=np.array([False, True, False, True]),
        logprobs=np.zeros(4, np.float32),
        versions=(),
        observed=np.array(observed),
    )
    rollout = make_rollout(reward)
    return Rollout(**{name: getattr(rollout, name) for name in rollout.__slots__} | {"branches": (branch,)})


@pytest.mark.parametrize(("observed", "filtered"), [([False] * 4, ZERO_SIGNAL), ([False, False, True, False], None)])
def test_a_group_without_advantage_ships_if_it_has_something_else_to_teach(
    observed: list[bool], filtered: str | None
) -> None:
    rule = GroupRule(GRPO, TokenWeights(observation=0.1))
    group = FinalGroup(make_ticket(0, 2), (two_turn_rollout(1.0, observed), two_turn_rollout(1.0, observed)))
    assert score(group, rule).filtered == filtered


def test_distance_to_a_teacher_needs_no_reward() -> None:
    for weights in (TokenWeights(rl=0.0, ref_kl=1.0), TokenWeights(rl=0.5, ref_kl=1.0), TokenWeights(rl=0.0, ce=1.0)):
        scored = score(make_group([1.0, 1.0]), GroupRule(GRPO, weights))
        assert (scored.filtered, scored.advantages, scored.weights) == (None, (0.0, 0.0), weights)
