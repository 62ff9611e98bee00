"""Two real ranks, and an orchestrator that dies after it answered one of them and before it answered the other."""

import time
from pathlib import Path

import pytest

from tests.support.process import Process
from tests.trainer.runs import RUN_ID, FakeOrchestrator, make_sample, torchrun
from tests.trainer.waiting_ranks import AWAY_S, NUM_STEPS

pytestmark = pytest.mark.integration
PATIENCE_S = 240.0


def test_ranks_wait_together_for_an_orchestrator_that_answered_one_of_them_and_died(tmp_path, start):
    """It stays away for longer than a collective may take, once for each thing that ranks ask or tell."""
    ranks_dir, outbox = tmp_path / "ranks", tmp_path / "outbox"
    ranks_dir.mkdir()
    with FakeOrchestrator(outbox, RUN_ID) as server:
        server.publish(*range(1, NUM_STEPS + 1))
        endpoint = server.endpoint
        process = start(*torchrun(2, "-m", "tests.trainer.waiting_ranks", str(ranks_dir), endpoint))
        one_has_it(process, ranks_dir, "manifest")
    for call, following in (("manifest", "samples"), ("samples", "published"), ("published", None)):
        (ranks_dir / f"{call}.go").touch()  # asks a server that is gone
        back_at = time.monotonic() + AWAY_S
        process.until(lambda at=back_at: time.monotonic() > at, within_s=10 * AWAY_S)
        assert process.poll() is None, process.output
        with FakeOrchestrator(outbox, RUN_ID, endpoint) as server:
            if following is not None:
                one_has_it(process, ranks_dir, following)
            else:
                process.finish(within_s=PATIENCE_S)
                assert server.progress == (NUM_STEPS, NUM_STEPS)
    for rank in range(2):
        told = [f"{step}: {make_sample(RUN_ID, step, rank).trajectory_id}" for step in range(1, NUM_STEPS + 1)]
        assert (ranks_dir / f"trained.{rank}").read_text().splitlines() == told


def one_has_it(process: Process, folder: Path, call: str) -> None:
    """Wait until one rank has its answer to `call`, if it needs one, and the other is late with asking."""
    wanted = [folder / f"{call}.late", *([] if call == "published" else [folder / f"{call}.answered"])]
    process.until(lambda: all(path.exists() for path in wanted), within_s=PATIENCE_S)
    assert process.poll() is None, process.output
