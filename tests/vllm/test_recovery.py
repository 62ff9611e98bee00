"""vLLM is killed in the middle of a run: it comes back with the current weights, and the run ends as if nothing was."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.circle import RL_CONFIG, VLLM_FLAGS, Finished
from tests.support.process import Service

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
NUM_STEPS = 14


class Run(Service):
    """`rl` with vLLM, in a process of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.path = folder / "kill"
        words = ["runtime", "@", str(RL_CONFIG), "--run.dir", str(folder), "--run.name", "kill"]
        super().__init__(
            "rl", self.path, *words, "--model.path", str(model), "--max-steps", str(NUM_STEPS), *VLLM_FLAGS
        )

    def steps(self) -> int:
        """Steps that the trainer has finished."""
        path = self.path / "metrics" / "trainer.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def vllm(self) -> psutil.Process:
        """The API server of vLLM."""
        service = json.loads((self.path / "services" / "inference.json").read_text())
        children = psutil.Process(service["pid"]).children()
        return next(child for child in children if "vllm.entrypoints" in " ".join(child.cmdline()))

    def end(self, within_s: float) -> Finished:
        return Finished(self.path, self.wait(within_s), self.output)


@pytest.fixture
def run(tmp_path: Path, copy_model: Path) -> Iterator[Run]:
    """A run that does not outlive the test."""
    run = Run(tmp_path, copy_model)
    yield run
    run.stop(within_s=120)


def test_killed_vllm_comes_back_with_the_current_weights(run: Run) -> None:
    run.until(lambda: run.steps() >= 4, within_s=400)
    os.kill(run.vllm().pid, signal.SIGKILL)
    finished = run.end(within_s=400)
    assert finished.exit_code == 0, finished.output
    assert finished.column("trainer", "step") == list(range(1, NUM_STEPS + 1))
    assert max(finished.column("orchestrator", "staleness/all/max")) <= 2
    log = (finished.path / "logs" / "inference.log").read_text()
    assert "vLLM is started again (1 of 3)" in log
    lives = (finished.path / "logs" / "vllm.out").read_text().split("Starting vLLM server on")[1:]
    assert len(lives) == 2
    assert "is in the model" in lives[1], "the second life never got weights"
