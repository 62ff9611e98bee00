"""Images in the whole circle: drawn by the environment, seen by the engine, trained on by the trainer.

`make test` runs it with the embedded engine, `make test-vllm` with vLLM.
"""

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inference.contract_server import ENGINE
from tests.integration.circle import COLOUR_CONFIG, ROOT, Finished, environment, run_rl

pytestmark = pytest.mark.integration


def make_model(folder: Path, warm_start: str) -> Path:
    """A vision model that names a colour rightly about that often."""
    command = [sys.executable, "-m", "tiny_models", "--task", "colour", "--warm-start", warm_start]
    subprocess.run([*command, "--out", str(folder)], cwd=ROOT, env=environment(), check=True, timeout=240)
    return folder


def run_colours(folder: Path, model: Path, *flags: str, timeout_s: float) -> Finished:
    return run_rl(folder, model, "--inference.engine", ENGINE, *flags, config=COLOUR_CONFIG, timeout_s=timeout_s)


@pytest.mark.timeout(900)
def test_engine_and_trainer_see_the_same_images(tmp_path: Path) -> None:
    flags = ("--max-steps", "3", "--orchestrator.max-staleness", "0", "--orchestrator.batch-size", "64")
    run = run_colours(tmp_path, make_model(tmp_path / "model", "0.1"), *flags, timeout_s=600)
    assert run.exit_code == 0, run.output
    assert min(run.column("trainer", "ratio/all/min")) > 1 - 1e-4
    assert max(run.column("trainer", "ratio/all/max")) < 1 + 1e-4
    assert min(run.column("trainer", "images/global")) > 0
    assert all(row.get("samples_refused/global", 0) == 0 for row in run.metrics("trainer"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_reward_of_naming_colours_rises(tmp_path: Path) -> None:
    run = run_colours(tmp_path, make_model(tmp_path / "model", "0.3"), timeout_s=1400)
    assert run.exit_code == 0, run.output
    rewards = run.column("orchestrator", "reward/all/mean")
    assert statistics.mean(rewards[-10:]) >= statistics.mean(rewards[:5]) + 0.2
