"""PPO as a user starts it: a critic in the trainer, rewards as advantages from the orchestrator."""

import statistics
from pathlib import Path

import pytest

from tests.integration.circle import ROOT, run_rl

pytestmark = pytest.mark.integration
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
