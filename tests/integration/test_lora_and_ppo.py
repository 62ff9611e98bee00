"""LoRA as a user starts it: the circle turns, the engine serves the adapter that was trained, reward rises.

PPO as a user starts it: a critic in the trainer, rewards as advantages from the orchestrator.
"""

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.circle import ROOT, environment, run_rl
from transport.wire.weights import read_weight_manifest, version_dir

pytestmark = pytest.mark.integration

LORA_CONFIG = ROOT / "configs" / "copy_text_lora" / "rl.toml"

NUM_STEPS = 3


@pytest.fixture(scope="module")
def lora_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the config: its frozen head can be sure of an answer."""
    folder = tmp_path_factory.mktemp("models") / "copy-text-lora"
    command = [sys.executable, "-m", "tiny_models", "--task", "copy-text", "--warm-start", "0.2", "--head-gain", "8"]
    subprocess.run([*command, "--out", str(folder)], cwd=ROOT, env=environment(), check=True, timeout=120)
    return folder


def test_engine_samples_with_the_adapter_that_two_ranks_trained(tmp_path: Path, lora_model: Path) -> None:
    """Without staleness, ratios of 1 say that the engine serves exactly what was trained."""
    flags = ("--max-steps", str(NUM_STEPS), "--trainer-ranks", "2", "--orchestrator.max-staleness", "0")
    trained = run_rl(tmp_path, lora_model, *flags, config=LORA_CONFIG)
    assert trained.exit_code == 0, trained.output
    assert trained.column("trainer", "step") == list(range(1, NUM_STEPS + 1))
    assert min(trained.column("trainer", "ratio/all/min")) > 1 - 1e-4
    assert max(trained.column("trainer", "ratio/all/max")) < 1 + 1e-4
    assert read_weight_manifest(version_dir(trained.path / "weights", NUM_STEPS) / "manifest.json").adapter is not None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_reward_rises(tmp_path: Path, lora_model: Path) -> None:
    run = run_rl(tmp_path, lora_model, config=LORA_CONFIG, timeout_s=800)
    assert run.exit_code == 0, run.output
    rewards = run.column("orchestrator", "reward/all/mean")
    assert len(rewards) == 60
    assert statistics.mean(rewards[-10:]) >= statistics.mean(rewards[:5]) + 0.4


PPO_CONFIG = ROOT / "configs" / "copy_text_ppo" / "rl.toml"


def test_the_circle_turns_with_a_critic(tmp_path: Path, copy_model: Path) -> None:
    run = run_rl(tmp_path, copy_model, "--max-steps", "3", config=PPO_CONFIG)
    assert run.exit_code == 0, run.output
    assert run.column("trainer", "step") == [1, 2, 3]
    losses = run.column("trainer", "loss/value")
    assert all(loss > 0 for loss in losses)
    assert run.column("trainer", "critic/lr") == [1e-3] * 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_reward_rises_with_a_critic(tmp_path: Path, copy_model: Path) -> None:
    run = run_rl(tmp_path, copy_model, config=PPO_CONFIG, timeout_s=800)
    assert run.exit_code == 0, run.output
    rewards = run.column("orchestrator", "reward/all/mean")
    assert len(rewards) == 80
    assert statistics.mean(rewards[-10:]) >= statistics.mean(rewards[:5]) + 0.3
