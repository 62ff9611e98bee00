"""Activation checkpointing and compilation change memory and speed, and nothing else."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.ranks import GradientRecorder
from tests.trainer.core.rank_worker import CPU, micro_batches_of, train_scenario
from tests.trainer.core.scenarios import SCENARIOS, SEQ_LEN
from trainer.checks.packing import verify_packing
from trainer.config.model import CriticConfig, ModelConfig
from trainer.critic.critic import OwnCritic, load_critic
from trainer.errors import ModelUnusable
from trainer.model.activations import why_not_compiled
from trainer.model.policy import Policy, load_policy


def gradients(policy: Policy) -> dict[str, Tensor]:
    recorder = GradientRecorder(policy.causal_lm)
    train_scenario(policy, recorder, SCENARIOS["packed"], 0, 1)
    return recorder.gradients


def test_checkpointed_activations_give_the_same_gradients_bit_for_bit(policy: Policy, model_path: Path) -> None:
    config = ModelConfig(path=model_path, seq_len=SEQ_LEN, activation_checkpointing=True)
    checkpointed = load_policy(config, CPU)
    verify_packing(checkpointed, CPU)
    expected = gradients(policy)
    found = gradients(checkpointed)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_each_layer_runs_twice_when_activations_are_checkpointed(model_path: Path) -> None:
    config = ModelConfig(path=model_path, seq_len=SEQ_LEN, activation_checkpointing=True)
    policy = load_policy(config, CPU)
    calls = []
    policy.causal_lm.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    report = train_scenario(policy, GradientRecorder(policy.causal_lm), SCENARIOS["packed"], 0, 1)
    assert len(calls) == 2 * report.metrics["micro_batches/local"]
    assert not any(module.training for module in policy.causal_lm.model.layers[0].mlp.modules())


def test_a_critic_with_a_trunk_of_its_own_checkpoints_its_activations_too(policy: Policy, model_path: Path) -> None:
    config = ModelConfig(path=model_path, seq_len=SEQ_LEN, activation_checkpointing=True)
    critic = load_critic(CriticConfig(), config, policy, CPU)
    assert isinstance(critic, OwnCritic)
    calls = []
    critic.trunk.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    critic(micro_batches_of(SCENARIOS["packed"], 0, 1)[0]).sum().backward()
    assert len(calls) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_give_the_same_gradients(policy: Policy, model_path: Path, checkpointing: bool) -> None:
    config = ModelConfig(path=model_path, seq_len=SEQ_LEN, compile=True, activation_checkpointing=checkpointing)
    expected, compiled = gradients(policy), load_policy(config, CPU)
    verify_packing(compiled, CPU)
    found = gradients(compiled)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_compilation_without_a_compiler_fails_at_start_up(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not_compiled(torch.device("cuda")) == "the package triton is not installed"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "gxx-of-nobody")
    with pytest.raises(ModelUnusable, match=r"model\.compile = true cannot work on cpu: no C\+\+ compiler .*gxx-of"):
        load_policy(ModelConfig(path=model_path, seq_len=SEQ_LEN, compile=True), CPU)
