"""Row 3: a trainer rank dies. All ranks and their launcher end with a code that is not 0 within 30 s."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from runtime.run_dir.service_lock import read_holder
from tests.faults.liveness.run import port_of, toy_config, toy_orchestrator, trainer_flags
from tests.support.process import service

pytestmark = pytest.mark.integration

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
