"""No silent hang: a stalled service dumps its stacks, tells who waits for whom across services, and exits with 75.

What hangs is real: a trainer that never comes, a checkpoint on a pipe that nobody writes to, a model too slow to load.

Row 3: a trainer rank dies. All ranks and their launcher end with a code that is not 0 within 30 s.
"""

import os
import signal
from pathlib import Path

import psutil
import pytest

from runtime.errors import ExitCode
from runtime.run_dir.run_dir import RunDir
from runtime.run_dir.service_lock import read_holder
from tests.faults.liveness.run import RUN, port_of, toy_config, toy_orchestrator, trainer_flags
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


DEAD_RANK_S = 30.0


def test_survivor_of_a_killed_rank_ends_by_itself_and_so_does_torchrun(tmp_path: Path, model: Path) -> None:
    """torchrun is frozen at first, as if it were on another machine: the survivor must not need its help."""
    config = toy_config(tmp_path)
    flags = trainer_flags(config, model, port_of(config.server.endpoint))
    launcher = ("--standalone", "--nproc-per-node", "2", "-m", "trainer", *flags)
    with (
        toy_orchestrator(config),
        service("trainer", config.run.path, "torch.distributed.run", *launcher) as torchrun,
    ):
        torchrun.until(lambda: (torchrun.health().get("step") or 0) >= 2)
        services = torchrun.run_dir.services
        first, second = (read_holder(services / f"{name}.lock").pid for name in ("trainer", "trainer-1"))
        torchrun.send(signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)
        torchrun.until(lambda: psutil.Process(first).status() == psutil.STATUS_ZOMBIE, within_s=DEAD_RANK_S)
        torchrun.send(signal.SIGCONT)
        assert torchrun.wait(within_s=DEAD_RANK_S) != 0
        ended = read_holder(services / "trainer.lock").ended
        assert ended.startswith("exit 76: rank 0 lost another rank"), ended
