"""kill -9, SIGTERM and stalls of a real orchestrator process."""

import random
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from orchestrator.ledger import LEDGER_NAME, read_ledger
from runtime.exit_codes import ExitCode
from runtime.run_dir import RunDir
from tests.orchestrator.core.toys import make_config, write_config
from tests.support.fakes import FakeTrainer, training
from tests.support.process import process
from transport.ledger_records import tally

pytestmark = pytest.mark.integration

SERVICE = "tests.orchestrator.core.toy_service"


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


def test_a_terminated_orchestrator_exits_0_and_leaves_a_balanced_ledger(tmp_path: Path) -> None:
    config = make_config(tmp_path, max_steps=10_000)
    with process(tmp_path / "out", SERVICE, "@", str(write_config(config, tmp_path))) as child:
        ledger_path = tmp_path / "toy" / "ledger" / LEDGER_NAME
        batch = tmp_path / "toy" / "outbox" / "step-00000002.batch"
        child.until(batch.exists)
        assert child.stop() == ExitCode.OK, child.output
    ledger = tally(read_ledger(ledger_path))
    assert ledger.balances, ledger.problems
    assert not ledger.states["in_flight"]
    assert not (tmp_path / "toy" / "services" / "orchestrator.json").exists()


def test_a_silent_trainer_ends_in_a_stall_that_says_who_waits_for_whom(tmp_path: Path) -> None:
    config = make_config(tmp_path, max_steps=10, stall_timeout_s=2.0)
    with process(tmp_path / "out", SERVICE, "@", str(write_config(config, tmp_path))) as child:
        assert child.wait() == ExitCode.STALLED
    output = child.output
    assert "orchestrator stalled" in output
    assert "policy version 1 from the trainer (0 is live)" in output


def test_health_says_what_the_orchestrator_waits_for(tmp_path: Path) -> None:
    config = make_config(tmp_path, max_steps=10)
    with process(tmp_path / "out", SERVICE, "@", str(write_config(config, tmp_path))) as child:
        services = RunDir(tmp_path / "toy")
        child.until(lambda: "orchestrator" in services.read_services())
        url = services.read_services()["orchestrator"].health_url

        def is_waiting() -> bool:
            try:
                with urllib.request.urlopen(url, timeout=5) as reply:
                    return b"policy version 1 from the trainer" in reply.read()
            except urllib.error.HTTPError:  # 503: still starting
                return False

        child.until(is_waiting)


def test_a_second_orchestrator_of_the_same_run_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, max_steps=10)
    arguments = [SERVICE, "@", str(write_config(config, tmp_path))]
    with process(tmp_path / "out", *arguments) as first:
        first.until((tmp_path / "toy" / "services" / "orchestrator.json").exists)
        with process(tmp_path / "second", *arguments) as second:
            assert second.wait() == ExitCode.USAGE
    assert f"pid {first.pid}" in second.output
