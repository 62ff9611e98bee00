"""Whole runs under each staleness policy: real scheduler, ledger, outbox and wire; and kill -9 of the real process.

kill -9 of a real orchestrator process whose engine answers by version: a resume with other weights would show.
"""

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.records.history import HISTORY_NAME
from orchestrator.records.ledger import LEDGER_NAME, read_ledger
from runtime.errors import ExitCode
from tests.orchestrator.toys import ToyEnv, make_config, make_engine, run_toy, write_config
from tests.support.fakes import FakeTrainer, training
from tests.support.metrics import read_metrics
from tests.support.process import process
from transport.wire.ledger import tally


def check(trainer: FakeTrainer, folder: Path, max_steps: int, max_staleness: int) -> Counter[str]:
    """Every batch was trained, in time and once; the ledger agrees. Its states."""
    assert sorted(trainer.batches) == list(range(1, max_steps + 1))
    ids = Counter(sample.trajectory_id for samples in trainer.batches.values() for sample in samples)
    assert set(ids.values()) == {1}, "a rollout was trained twice"
    for step, samples in trainer.batches.items():
        assert all(step - 1 - (sample.oldest_version or 0) <= max_staleness for sample in samples)
    ledger = tally(read_ledger(folder / "toy" / "ledger" / LEDGER_NAME))
    assert ledger.balances, ledger.problems
    trained = {step: ledger.states[f"trained@{step}"] for step in trainer.batches}
    assert trained == {step: len(samples) for step, samples in trainer.batches.items()}
    return ledger.states


@pytest.mark.parametrize("policy", ["wait", "drop"])
async def test_every_policy_trains_to_the_end_within_its_bound(tmp_path: Path, policy: str) -> None:
    engine = make_engine(latency=lambda request, _: 0.002 * ((request.seed or 0) % 16))
    config = make_config(tmp_path, max_steps=8, staleness_policy=policy, max_in_flight=48)
    trainer = await run_toy(config, engine, [ToyEnv(engine)])
    states = check(trainer, tmp_path, 8, max_staleness=1)
    assert policy == "drop" or not states["stale"]
    rows = read_metrics(tmp_path / "toy" / "metrics" / "orchestrator.jsonl")
    for row in rows:
        for key in ("waste/all/share", "waste/toy/share", "length_bias/all/ratio", "length_bias/toy/ratio"):
            assert row[key] is not None, key
    stale = sum(row.get("filtered/all/stale") or 0 for row in rows)
    assert 4 * stale == states["stale"], "metrics and ledger agree on what was thrown away"
    assert any((row["waste/all/stale_share"] or 0) > 0 for row in rows) == bool(stale)
    assert not (tmp_path / "toy" / "state" / HISTORY_NAME).exists(), "only curricula need a history"


@pytest.mark.integration
def test_a_killed_run_trains_no_rollout_twice(tmp_path: Path) -> None:
    config = make_config(tmp_path, max_steps=10, staleness_policy="drop", max_staleness=1)
    arguments = ["tests.orchestrator.toy_service", "@", str(write_config(config, tmp_path))]
    draw = random.Random(3)
    with training(FakeTrainer(config.server.endpoint, commit_every=3)) as trainer:
        for after_step in (2, 6):
            with process(tmp_path / "out", *arguments, TOY_LATENCY_S="0.02") as child:
                child.until(lambda step=after_step: step in trainer.digests)
                time.sleep(draw.uniform(0.0, 0.05))  # not a wait: the instant of the kill is the thing under test
                child.kill()
        with process(tmp_path / "out", *arguments, TOY_LATENCY_S="0.02") as child:
            assert child.wait() == ExitCode.OK, child.output
    states = check(trainer, tmp_path, 10, max_staleness=1)
    assert states["cancelled"] > 0, "no kill hit a rollout in flight"
    assert not states["in_flight"]


SERVICE = "tests.orchestrator.toy_service"


def run_whole(folder: Path, **changes: object) -> FakeTrainer:
    """A run without faults."""
    folder.mkdir()
    config = make_config(folder, **changes)
    arguments = [SERVICE, "@", str(write_config(config, folder))]
    with (
        training(FakeTrainer(config.server.endpoint, commit_every=3)) as trainer,
        process(folder / "out", *arguments) as child,
    ):
        assert child.wait() == ExitCode.OK, child.output
    return trainer


@pytest.mark.integration
def test_a_killed_orchestrator_cuts_the_same_batches(tmp_path: Path) -> None:
    changes = {"max_steps": 12, "max_staleness": 0}
    reference = run_whole(tmp_path / "whole", **changes)
    folder = tmp_path / "killed"
    folder.mkdir()
    config = make_config(folder, **changes)
    arguments = [SERVICE, "@", str(write_config(config, folder))]
    draw = random.Random(7)
    with training(FakeTrainer(config.server.endpoint, commit_every=3)) as trainer:
        for after_step in (1, 4, 8):
            with process(folder / "out", *arguments, TOY_LATENCY_S="0.01") as child:
                child.until(lambda step=after_step: step in trainer.digests)
                time.sleep(draw.uniform(0.0, 0.1))  # not a wait: the instant of the kill is the thing under test
                child.kill()
        with process(folder / "out", *arguments) as child:
            assert child.wait() == ExitCode.OK, child.output
    assert trainer.digests == reference.digests
    ledger = tally(read_ledger(folder / "toy" / "ledger" / LEDGER_NAME))
    assert ledger.balances, ledger.problems
    assert ledger.states["cancelled"] > 0, "no kill hit a rollout in flight"
    trained = {step: ledger.states[f"trained@{step}"] for step in trainer.batches}
    assert trained == {step: len(samples) for step, samples in trainer.batches.items()}
