"""kill -9 of a real orchestrator process whose engine answers by version: a resume with other weights would show."""

import random
import time
from pathlib import Path

import pytest

from orchestrator.records.ledger import LEDGER_NAME, read_ledger
from runtime.errors import ExitCode
from tests.orchestrator.toys import make_config, write_config
from tests.support.fakes import FakeTrainer, training
from tests.support.process import process
from transport.wire.ledger import tally

pytestmark = pytest.mark.integration

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
