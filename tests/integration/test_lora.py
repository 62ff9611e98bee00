"""LoRA as a user starts it: the circle turns, the engine serves the adapter that was trained, others can load it."""

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.integration.circle import ROOT, Finished, environment, run_rl
from transport.weights import read_weight_manifest, version_dir

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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, lora_model: Path) -> Finished:
    """A few steps on two ranks, without staleness: the engine must serve exactly what was trained."""
    flags = ("--max-steps", str(NUM_STEPS), "--trainer-ranks", "2", "--orchestrator.max-staleness", "0")
    return run_rl(tmp_path_factory.mktemp("runs"), lora_model, *flags, config=LORA_CONFIG)


def test_engine_samples_with_the_adapter_that_the_ranks_trained(trained: Finished) -> None:
    assert trained.exit_code == 0, trained.output
    assert trained.column("trainer", "step") == list(range(1, NUM_STEPS + 1))
    assert min(trained.column("trainer", "ratio/all/min")) > 1 - 1e-4
    assert max(trained.column("trainer", "ratio/all/max")) < 1 + 1e-4


def test_exported_adapter_is_the_published_one_and_has_learned(
    trained: Finished, lora_model: Path, tmp_path: Path
) -> None:
    manifest = read_weight_manifest(version_dir(trained.path / "weights", NUM_STEPS) / "manifest.json")
    assert manifest.adapter is not None
    command = [sys.executable, "-m", "trainer", "export", "--run", str(trained.path), "--out", str(tmp_path / "out")]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=120)
    base = AutoModelForCausalLM.from_pretrained(lora_model)
    tokens = torch.arange(4, 24)[None]
    with torch.no_grad():
        before = base(tokens).logits
        after = PeftModel.from_pretrained(base, tmp_path / "out")(tokens).logits
    assert (after - before).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_reward_rises(tmp_path: Path, lora_model: Path) -> None:
    run = run_rl(tmp_path, lora_model, config=LORA_CONFIG, timeout_s=800)
    assert run.exit_code == 0, run.output
    rewards = run.column("orchestrator", "reward/all/mean")
    assert len(rewards) == 60
    assert statistics.mean(rewards[-10:]) >= statistics.mean(rewards[:5]) + 0.4
