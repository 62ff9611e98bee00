"""The wired orchestrator: real outbox, server, client and ledger; a toy environment and a scripted engine.

A run with real environments: one raises in 30 % of its rollouts, one hangs, and one scores groups jointly.
"""

import asyncio
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from chat.tokenizer import Int32s, Tokenizer
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.loading import load_env
from orchestrator.envs.protocol import RolloutRequest, close_adapter
from orchestrator.errors import FailureRateError, StateColumnError
from orchestrator.records.ledger import LEDGER_NAME, read_ledger
from orchestrator.values.rollout import FailureReason, RolloutFailure
from runtime.errors import ExitCode, UserError, find_service_error
from tests.orchestrator.toys import DEADLINE_S, ToyEnv, make_config, make_engine, run_orchestrator, run_toy
from tests.support.fakes import FakeTrainer, training
from tests.support.metrics import read_metrics
from transport.client.client import BatchClient
from transport.wire.generation import GenerateRequest, ServedWeights
from transport.wire.ledger import Tally, tally


def ledger_of(folder: Path) -> Tally:
    return tally(read_ledger(folder / "toy" / "ledger" / LEDGER_NAME))


async def test_every_step_is_trained_and_the_run_ends(tmp_path: Path) -> None:
    engine = make_engine()
    env = ToyEnv(engine)
    trainer = await run_toy(make_config(tmp_path), engine, [env])
    assert sorted(trainer.batches) == [1, 2, 3, 4]
    for step, samples in trainer.batches.items():
        assert len(samples) >= 8
        assert len({sample.group_id for sample in samples}) >= 2
        assert all((step - 1) - sample.oldest_version <= 1 for sample in samples if sample.oldest_version is not None)
        assert any(sample.advantages != 0 for sample in samples)
    assert engine.weights == ServedWeights(version=4, digest="digest-4")
    assert not env.is_open
    assert len(asyncio.all_tasks()) == 1, "an orphan task is left"


@dataclass
class FallenBackTrainer(FakeTrainer):
    """Has a step that takes longer than the orchestrator of a finished run lingers."""

    greeted: threading.Event = field(default_factory=threading.Event)

    def _train(self, client: BatchClient) -> None:
        client.hello()
        self.greeted.set()
        threading.Event().wait(1.0)
        super()._train(client)


async def test_a_finished_run_waits_for_a_trainer_that_lost_its_last_checkpoint(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with training(FakeTrainer(config.server.endpoint, commit_every=2)) as first:
        await run_orchestrator(config, engine := make_engine(), [ToyEnv(engine)])
    second = FallenBackTrainer(config.server.endpoint, last_committed=2)

    class ToyEnvAfterGreeting(ToyEnv):
        async def start(self) -> None:
            assert await asyncio.to_thread(second.greeted.wait, DEADLINE_S)

    again = config.model_copy(update={"server": config.server.model_copy(update={"peer_timeout_s": 0.1})})
    with training(second):
        await run_orchestrator(again, engine := make_engine(), [ToyEnvAfterGreeting(engine)])
    assert second.digests == {step: digest for step, digest in first.digests.items() if step > 2}
    assert second.last_committed == 4


async def test_the_ledger_accounts_for_every_dispatched_rollout(tmp_path: Path) -> None:
    engine = make_engine()
    env = ToyEnv(engine)
    trainer = await run_toy(make_config(tmp_path), engine, [env])
    result = ledger_of(tmp_path)
    assert result.balances, result.problems
    assert result.num_dispatched == len(env.requests)
    for step, samples in trainer.batches.items():
        assert result.states[f"trained@{step}"] == len({sample.trajectory_id for sample in samples})
    assert not result.states["in_flight"]


async def test_groups_are_whole_keyed_and_seeded(tmp_path: Path) -> None:
    engine = make_engine()
    env = ToyEnv(engine, num_examples=5)
    trainer = await run_toy(make_config(tmp_path), engine, [env])
    sizes = Counter(sample.group_id for samples in trainer.batches.values() for sample in samples)
    assert set(sizes.values()) == {4}
    assert len({request.seed for request in env.requests}) == len(env.requests)
    assert len({request.group_id for request in env.requests}) * 4 == len(env.requests), "a visit is its own group"


async def test_batches_do_not_depend_on_timing(tmp_path: Path) -> None:
    digests = []
    for index, latency in enumerate((0.0, 0.01)):
        engine = make_engine(latency=lambda request, _, latency=latency: latency * ((request.seed or 0) % 3))
        config = make_config(tmp_path / str(index), max_staleness=0)
        trainer = await run_toy(config, engine, [ToyEnv(engine)])
        digests.append(trainer.digests)
    assert digests[0] == digests[1]


async def test_a_synchronous_run_samples_every_batch_from_its_own_policy(tmp_path: Path) -> None:
    engine = make_engine()
    trainer = await run_toy(make_config(tmp_path, max_staleness=0), engine, [ToyEnv(engine)])
    for step, samples in trainer.batches.items():
        assert {span.version for sample in samples for span in sample.versions} == {step - 1}


async def test_environments_are_mixed_by_ratio(tmp_path: Path) -> None:
    engine = make_engine()
    envs = [
        {"id": "toy", "name": "often", "group_size": 4, "ratio": 3.0},
        {"id": "toy", "name": "seldom", "group_size": 2, "ratio": 1.0},
    ]
    adapters = [ToyEnv(engine, name="often"), ToyEnv(engine, name="seldom")]
    await run_toy(make_config(tmp_path, envs=envs, max_steps=12, batch_size=16), engine, adapters)
    groups = [len({request.group_id for request in adapter.requests}) for adapter in adapters]
    assert groups[0] / sum(groups) == pytest.approx(0.75, abs=0.15)


async def test_metrics_and_rollouts_are_saved_per_step(tmp_path: Path) -> None:
    engine = make_engine()
    await run_toy(make_config(tmp_path), engine, [ToyEnv(engine)])
    rows = read_metrics(tmp_path / "toy" / "metrics" / "orchestrator.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for key in ("reward/all/mean", "reward/toy/std", "advantage/all/max", "length/toy/mean", "staleness/all/max"):
        assert rows[0][key] is not None, key
    assert max(row["staleness/all/max"] or 0 for row in rows) <= 1
    path = tmp_path / "toy" / "rollouts" / "step-00000002.jsonl"
    saved = [json.loads(line) for line in path.read_text().splitlines()]
    trained = [row for row in saved if row["state"] == "trained@2"]
    assert len(trained) >= 8
    assert {"reward", "advantage", "messages", "num_sampled_tokens", "oldest_version"} <= trained[0].keys()


def fail_every_third(request: RolloutRequest) -> RolloutFailure | None:
    return RolloutFailure(FailureReason.ENV_ERROR, "on purpose") if request.seed % 3 == 0 else None


async def test_a_failure_drops_a_jointly_scored_group(tmp_path: Path) -> None:
    engine = make_engine()
    env = ToyEnv(engine, scores_jointly=True, fault=fail_every_third)
    trainer = await run_toy(make_config(tmp_path), engine, [env])
    sizes = Counter(sample.group_id for samples in trainer.batches.values() for sample in samples)
    assert set(sizes.values()) == {4}
    assert ledger_of(tmp_path).balances


def raise_always(request: RolloutRequest) -> RolloutFailure | None:
    raise ConnectionError("the sandbox is gone")


async def test_an_environment_that_always_raises_stops_the_run_with_its_name(tmp_path: Path) -> None:
    engine = make_engine()
    config = make_config(tmp_path)
    with pytest.raises(BaseExceptionGroup) as caught:
        await run_orchestrator(config, engine, [ToyEnv(engine, fault=raise_always)])
    error = find_service_error(caught.value)
    assert isinstance(error, FailureRateError)
    assert "env 'toy'" in str(error)
    assert "ConnectionError: the sandbox is gone" in str(error)
    assert ledger_of(tmp_path).balances


async def test_a_mistake_that_only_a_rollout_shows_stops_the_run_as_a_users(tmp_path: Path) -> None:
    def ask_for_too_much(request: RolloutRequest) -> RolloutFailure | None:
        raise StateColumnError("env 'toy': its state has no column 'note'")

    engine = make_engine()
    with pytest.raises(BaseExceptionGroup) as caught:
        await run_orchestrator(make_config(tmp_path), engine, [ToyEnv(engine, fault=ask_for_too_much)])
    error = find_service_error(caught.value)
    assert isinstance(error, StateColumnError)
    assert error.exit_code == ExitCode.USAGE
    assert ledger_of(tmp_path).balances
    assert len(asyncio.all_tasks()) == 1, "an orphan task is left"


def test_a_stopped_run_continues_with_the_same_batches(tmp_path: Path) -> None:
    engine, restarted, whole, stop = make_engine(), make_engine(), make_engine(), asyncio.Event()

    def stop_at_version_2(request: RolloutRequest) -> RolloutFailure | None:
        if engine.weights.version >= 2:
            stop.set()
        return None

    config = make_config(tmp_path, max_steps=6, max_staleness=0)
    with training(FakeTrainer(config.server.endpoint)) as trainer:
        asyncio.run(run_orchestrator(config, engine, [ToyEnv(engine, fault=stop_at_version_2)], stop))
        stopped_at = ledger_of(tmp_path)
        asyncio.run(run_orchestrator(config, restarted, [ToyEnv(restarted)]))
    assert stopped_at.balances
    assert stopped_at.states["cancelled"] > 0
    assert not stopped_at.states["in_flight"]
    assert restarted.weights.version == 6, "a restarted engine was given the current weights"
    other = make_config(tmp_path / "whole", max_steps=6, max_staleness=0)
    assert trainer.digests == asyncio.run(run_toy(other, whole, [ToyEnv(whole)])).digests
    assert ledger_of(tmp_path).balances


async def test_engines_that_serve_another_run_are_refused(tmp_path: Path) -> None:
    engine = make_engine(weights=ServedWeights(version=3, digest="old"))
    with pytest.raises(BaseExceptionGroup) as caught:
        await run_orchestrator(make_config(tmp_path), engine, [ToyEnv(engine)])
    error = find_service_error(caught.value)
    assert isinstance(error, UserError)
    assert "serve version 3" in str(error)


async def test_changed_settings_do_not_continue_an_old_run(tmp_path: Path) -> None:
    engine = make_engine()
    await run_toy(make_config(tmp_path), engine, [ToyEnv(engine)])
    with pytest.raises(UserError, match=r"was started with seed 0.*now it has seed 1"):
        await run_toy(make_config(tmp_path, seed=1), engine, [ToyEnv(engine)])


async def test_an_environment_that_does_not_close_does_not_spoil_a_finished_run(tmp_path: Path) -> None:
    class Sticky(ToyEnv):
        async def close(self) -> None:
            await super().close()
            raise OSError("the sandbox is gone")

    engine = make_engine()
    config = make_config(tmp_path, max_steps=2)
    env = Sticky(engine)
    trainer = await run_toy(config, engine, [env])
    assert sorted(trainer.batches) == [1, 2]
    assert not env.is_open


async def test_an_environment_that_takes_too_long_to_close_is_left_alone() -> None:
    class Endless(ToyEnv):
        async def close(self) -> None:
            await asyncio.Event().wait()

    async with asyncio.timeout(30):
        await close_adapter(Endless(make_engine()), timeout_s=0.01)


RAISES = {"id": "flaky-text", "name": "raises", "args": {"task": {"raise_rate": 0.3}}}

HANGS = {
    "id": "flaky-text",
    "name": "hangs",
    "args": {"task": {"raise_rate": 0.0, "hang_rate": 0.1}},
    "rollout_timeout_s": 0.5,
}

JOINT = {"id": "group-race", "name": "joint", "rollout_timeout_s": 30.0}


def copier(tokenizer: Tokenizer) -> ScriptedEngine:
    """Copies the word in the prompt, rightly or with a wrong end, as the seed says."""
    end = min(tokenizer.eos_ids)

    def script(request: GenerateRequest) -> Int32s:
        found = re.search(r"copy: (\w+)", tokenizer.decode(request.token_ids.numpy()))
        assert found is not None
        seed = request.seed or 0
        letters = "abcdefghij"[seed // 2 % 10] + "abcdefghij"[seed // 20 % 10]
        reply = found[1] if seed % 2 else found[1][:-2] + letters
        return np.append(tokenizer.encode(reply), end).astype(np.int32)

    return ScriptedEngine(tokenizer.vocab_size, end, script=script)


@pytest.mark.parametrize("policy", [{}, {"failure_policy": "retry", "max_tries": 2}])
async def test_trouble_in_environments_is_survived_counted_and_told(
    tokenizer: Tokenizer, tmp_path: Path, policy: dict[str, object]
) -> None:
    common = {"group_size": 6, "sampling": {"max_tokens": 16}, **policy}
    envs = [env | common for env in (RAISES, HANGS, JOINT)]
    config = make_config(tmp_path, envs=envs, batch_size=24, max_steps=6, max_staleness=1)
    engine = copier(tokenizer)
    trainer = await run_toy(config, engine, [load_env(env, engine, tokenizer) for env in config.envs])
    assert sorted(trainer.batches) == [1, 2, 3, 4, 5, 6]
    samples = [sample for batch in trainer.batches.values() for sample in batch]
    assert {sample.env_name for sample in samples} == {"raises", "hangs", "joint"}
    groups: dict[str, set[str]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, set()).add(sample.trajectory_id)
    sizes = {group_id: len(members) for group_id, members in groups.items()}
    assert {size for group_id, size in sizes.items() if group_id.startswith("joint/")} == {6}
    assert min(sizes.values()) < 6, "no partial group shipped"

    result = tally(read_ledger(config.run.path / "ledger" / LEDGER_NAME))
    assert result.balances, result.problems
    assert not result.states["in_flight"]
    assert result.states["failed:env_error"] > 0
    assert result.states["failed:env_timeout"] > 0

    rows = read_metrics(config.run.path / "metrics" / "orchestrator.jsonl")
    total = {key: sum(row.get(key) or 0.0 for row in rows) for row in rows for key in row}
    assert total["failures/raises/env_error"] > 0
    assert total["failures/hangs/env_timeout"] > 0
    assert "failures/joint/env_error" not in total
    shares = [row["failures/raises/share"] for row in rows if "failures/raises/share" in row]
    assert 0.1 < float(np.mean([share or 0.0 for share in shares])) < 0.5
    assert all(f"reward/{env}/mean" in total for env in ("all", "raises", "hangs", "joint"))
