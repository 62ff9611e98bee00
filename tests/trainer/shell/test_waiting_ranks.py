"""Two real ranks, and an orchestrator that dies after it answered one of them and before it answered the other."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import until
from tests.trainer.shell.recorded import RUN_ID, make_sample
from tests.trainer.shell.runs import environment, finish
from tests.trainer.shell.stand_in import stand_in
from tests.trainer.shell.waiting import AWAY_S, NUM_STEPS

pytestmark = pytest.mark.integration
PATIENCE_S = 240.0
ROOT = Path(__file__).parents[3]


@pytest.fixture
def started() -> "Iterator[list[subprocess.Popen[str]]]":
    """Processes that must not outlive the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


def two_ranks(folder: Path, endpoint: str) -> "subprocess.Popen[str]":
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    script = (str(Path(__file__).with_name("waiting_ranks.py")), str(folder), endpoint)
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    return subprocess.Popen(
        (*launcher, *script),
        env=environment() | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_ranks_wait_together_for_an_orchestrator_that_answered_one_of_them_and_died(tmp_path, started):
    """It stays away for longer than a collective may take, once for each thing that ranks ask or tell."""
    ranks_dir, outbox = tmp_path / "ranks", tmp_path / "outbox"
    ranks_dir.mkdir()
    with stand_in(outbox, RUN_ID) as server:
        server.publish(*range(1, NUM_STEPS + 1))
        endpoint = server.endpoint
        started.append(two_ranks(ranks_dir, endpoint))
        (process,) = started
        one_has_it(process, ranks_dir, "manifest")
    for call, following in (("manifest", "samples"), ("samples", "published"), ("published", None)):
        (ranks_dir / f"{call}.go").touch()  # asks a server that is gone
        back_at = time.monotonic() + AWAY_S
        until(lambda at=back_at: time.monotonic() > at, within_s=10 * AWAY_S)
        assert process.poll() is None, process.communicate()[0]
        with stand_in(outbox, RUN_ID, endpoint) as server:
            if following is not None:
                one_has_it(process, ranks_dir, following)
            else:
                finish(process, within_s=PATIENCE_S)
                assert server.progress == (NUM_STEPS, NUM_STEPS)
    for rank in range(2):
        told = [f"{step}: {make_sample(RUN_ID, step, rank).trajectory_id}" for step in range(1, NUM_STEPS + 1)]
        assert (ranks_dir / f"trained.{rank}").read_text().splitlines() == told


def one_has_it(process: "subprocess.Popen[str]", folder: Path, call: str) -> None:
    """Wait until one rank has its answer to `call`, if it needs one, and the other is late with asking."""
    wanted = [folder / f"{call}.late", *([] if call == "published" else [folder / f"{call}.answered"])]
    until(lambda: process.poll() is not None or all(path.exists() for path in wanted), within_s=PATIENCE_S)
    assert process.poll() is None, process.communicate()[0]
