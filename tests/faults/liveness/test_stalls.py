"""No silent hang: a stalled service dumps its stacks, tells who waits for whom across services, and exits with 75.

What hangs is real: a trainer that never comes, a checkpoint on a pipe that nobody writes to, a model too slow to load.
"""

import os
from pathlib import Path

import pytest

from runtime.errors import ExitCode
from runtime.run_dir.run_dir import RunDir
from tests.faults.liveness.run import RUN, toy_config, toy_orchestrator, trainer_flags
from tests.support.process import Service, service

pytestmark = pytest.mark.integration

TRAINER_STALL_S = 12.0
"""Less than the 20 s that the list of faults allows in tests; longer than the orchestrator needs to start and stall."""


def assert_stalled(stalled: Service, *said: str) -> None:
    assert stalled.wait() == ExitCode.STALLED, stalled.output
    output = stalled.output
    assert f"{stalled.name} stalled: no progress for" in output
    assert "Current thread" in output or "Thread 0x" in output, "no stacks on stderr"
    assert (stalled.run_dir.logs / f"{stalled.name}.stacks").stat().st_size > 0
    assert "who waits for whom: " in output
    for words in said:
        assert words in output.rpartition("who waits for whom: ")[2], output[-2000:]


def test_orchestrator_without_a_trainer_stalls_and_names_it(tmp_path: Path) -> None:
    with toy_orchestrator(toy_config(tmp_path, stall_timeout_s=2.0)) as orchestrator:
        assert_stalled(orchestrator, "orchestrator is stalled", "policy version 1 from the trainer (0 is live)")


def test_trainer_that_hangs_and_orchestrator_that_waits_tell_the_whole_chain(tmp_path: Path, model: Path) -> None:
    config = toy_config(tmp_path, stall_timeout_s=2.0)
    checkpoint = RunDir(config.run.path).create().checkpoints / "step-00000001"
    checkpoint.mkdir()
    os.mkfifo(checkpoint / "manifest.json")
    flags = trainer_flags(config, model, 1, "--stall-timeout-s", str(TRAINER_STALL_S))
    with service("trainer", config.run.path, "trainer", *flags, warm=True) as trainer:
        trainer.until(lambda: trainer.health().get("status") == "starting")
        with toy_orchestrator(config) as orchestrator:
            waits = "policy version 1 from the trainer (0 is live)"
            assert_stalled(orchestrator, f"{waits}; trainer is starting, waiting for the checkpoint to load")
        assert_stalled(trainer, "trainer is stalled", "orchestrator is dead (exit 75: stalled: no progress for 2")
        assert "checkpoints/manifest.py" in trainer.output, "the stacks do not show where it hangs"


def test_inference_that_does_not_load_in_time_stalls_and_names_the_model(tmp_path: Path, model: Path) -> None:
    arguments = (
        *("--model.path", str(model), "--server.port", "0", "--run.dir", str(tmp_path), "--run.name", RUN),
        *("--stall-timeout-s", "0.3"),
    )
    with service("inference", tmp_path / RUN, "inference", *arguments) as inference:
        assert_stalled(inference, f"waiting for the model in {model}")
