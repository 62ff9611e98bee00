"""`rl` with `--inference.engine vllm`: one flag differs, the loop turns, reward rises, trainer and engine agree."""

import statistics
from pathlib import Path

import pytest

from tests.integration.circle import VLLM_FLAGS, Finished, run_rl

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
NUM_STEPS = 30


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, copy_model: Path) -> Finished:
    """A whole run with real vLLM."""
    folder = tmp_path_factory.mktemp("runs")
    return run_rl(folder, copy_model, *VLLM_FLAGS, "--max-steps", str(NUM_STEPS), timeout_s=800)


def test_reward_rises(trained: Finished) -> None:
    assert trained.exit_code == 0, trained.output
    rewards = trained.column("orchestrator", "reward/all/mean")
    assert len(rewards) == NUM_STEPS
    assert statistics.mean(rewards[-5:]) >= statistics.mean(rewards[:5]) + 0.15


def test_every_step_is_trained_once_and_none_is_too_stale(trained: Finished) -> None:
    assert trained.column("trainer", "step") == list(range(1, NUM_STEPS + 1))
    assert max(trained.column("orchestrator", "staleness/all/max")) <= 2


def test_trainer_and_vllm_agree_on_log_probabilities(tmp_path: Path, copy_model: Path) -> None:
    run = run_rl(
        tmp_path, copy_model, *VLLM_FLAGS, "--max-steps", "3", "--orchestrator.max-staleness", "0", timeout_s=600
    )
    assert run.exit_code == 0, run.output
    assert min(run.column("trainer", "ratio/all/min")) > 1 - 1e-4
    assert max(run.column("trainer", "ratio/all/max")) < 1 + 1e-4
