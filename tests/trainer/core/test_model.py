"""Loading: what cannot be trained rightly is refused at start-up, in one line that names the key."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM

from runtime.errors import UserError
from tests.trainer.core.rank_worker import CPU
from tests.trainer.core.tiny import make_samples, save_tiny_model
from trainer.checks.packing import verify_packing
from trainer.config.model import ModelConfig
from trainer.errors import ModelUnusable
from trainer.model.attention import AttentionKernel
from trainer.model.fsdp import decoder_layers, shard_policy
from trainer.model.policy import Policy, load_policy
from trainer.planning.micro_batch import SegmentInfo
from trainer.planning.pack import pack


def edit_config(path: Path, **changes: object) -> ModelConfig:
    saved = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(saved | changes))
    return ModelConfig(path=path, seq_len=64)


def test_a_loaded_policy_is_deterministic_and_trainable(policy: Policy) -> None:
    assert not policy.training
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in policy.parameters())


def test_parameters_keep_the_names_of_the_model_folder(policy: Policy, model_path: Path) -> None:
    names = {name for name, _ in policy.causal_lm.named_parameters()}
    assert names == set(load_file(model_path / "model.safetensors"))


def test_a_missing_folder_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.path = .*nowhere' is not a Hugging Face model folder"):
        load_policy(ModelConfig(path=tmp_path / "nowhere"), CPU)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelUnusable, match="cannot be loaded"):
        load_policy(ModelConfig(path=path, seq_len=64), CPU)


def test_missing_weights_are_refused_instead_of_made_up(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnusable, match=r"lacks weights .*layers\.1\.mlp\.up_proj"):
        load_policy(ModelConfig(path=path, seq_len=64), CPU)


def test_a_sample_cap_beyond_the_models_positions_is_refused(model_path: Path) -> None:
    with pytest.raises(ModelUnusable, match=r"model.seq_len \(1000\) is above the 512 positions"):
        load_policy(ModelConfig(path=model_path, seq_len=1000), CPU)


def test_layers_that_mix_positions_are_refused(tmp_path: Path) -> None:
    config = edit_config(save_tiny_model(tmp_path), layer_types=["full_attention", "linear_attention"])
    with pytest.raises(ModelUnusable, match="mix packed samples: linear_attention"):
        load_policy(config, CPU)


def test_a_soft_capped_head_is_refused(tmp_path: Path) -> None:
    config = edit_config(save_tiny_model(tmp_path), final_logit_softcapping=30.0)
    with pytest.raises(ModelUnusable, match="soft-capped"):
        load_policy(config, CPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_that_scales_its_logits_is_refused(tmp_path: Path, dtype: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = GraniteConfig(**sizes, vocab_size=64, logits_scaling=1.2, pad_token_id=None, bos_token_id=None)
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelUnusable, match=r"does more than a matrix product in its head .* wrong by 20%"):
        load_policy(ModelConfig(path=tmp_path, seq_len=64, dtype=dtype), CPU)


def test_bfloat16_scores_are_near_the_float32_ones(model_path: Path, policy: Policy) -> None:
    half = load_policy(ModelConfig(path=model_path, seq_len=64, dtype="bfloat16"), CPU)
    batch = pack(make_samples([20, 9]), [0, 0], [0, 1])
    scores = half(batch)
    scores.logprobs.sum().backward()
    assert scores.logprobs.dtype == torch.float32
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in half.parameters())
    torch.testing.assert_close(scores.logprobs, policy(batch).logprobs, rtol=0, atol=0.2)
    assert not torch.equal(scores.logprobs, policy(batch).logprobs)


def test_the_packing_check_passes_for_a_sound_model(policy: Policy) -> None:
    verify_packing(policy, CPU)
    assert all(parameter.grad is None for parameter in policy.parameters())


def leaky(q: Tensor, k: Tensor, v: Tensor, segments: SegmentInfo, scaling: float | None, window: int | None) -> Tensor:
    """Causal over the whole row, as if it were one sample."""
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_packing_check_catches_a_kernel_that_lets_samples_see_each_other(
    model_path: Path, dtype: torch.dtype
) -> None:
    kernel = AttentionKernel("leaky", leaky)
    kernel.install()
    model = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation=kernel.implementation)
    with pytest.raises(ModelUnusable, match="Qwen3ForCausalLM cannot be trained packed"):
        verify_packing(Policy(model, dtype), CPU)


def test_decoder_layers_are_what_transformers_says_must_stay_whole(policy: Policy) -> None:
    assert decoder_layers(policy.causal_lm) == list(policy.causal_lm.model.layers)


def test_a_model_without_known_layers_is_refused(policy: Policy) -> None:
    policy.causal_lm._no_split_modules = []
    with pytest.raises(ModelUnusable, match="does not say which of its modules are decoder layers"):
        decoder_layers(policy.causal_lm)


def test_a_plain_process_needs_no_sharding(policy: Policy) -> None:
    assert shard_policy(policy, None, reshard_after_forward=True) is policy
