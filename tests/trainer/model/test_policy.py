"""Loading: which models are trained and how; what cannot be trained rightly is refused in one line.

The tiled head equals the plain one, in values and gradients, and never holds all logits.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM

from runtime.errors import UserError
from tests.support.ranks import GradientRecorder
from tests.trainer.images.tiny_vlm import SPEC, save_tiny_vlm
from tests.trainer.model.conftest import Policies
from tests.trainer.rank_worker import CPU, micro_batches_of, train_scenario
from tests.trainer.scenarios import SCENARIOS, SEQ_LEN, make_samples, save_tiny_model
from trainer.checks.packing import verify_packing
from trainer.config.model import CriticConfig, ModelConfig
from trainer.critic.critic import OwnCritic, load_critic
from trainer.errors import ModelUnusable
from trainer.model.activations import why_not_compiled
from trainer.model.fsdp import decoder_layers, shard_policy
from trainer.model.logprobs import TileSize, TokenScores, token_scores
from trainer.model.policy import Policy, load_policy
from trainer.model.vision import FAMILIES, validate_multimodal_pack
from trainer.planning.layout import RowSharing
from trainer.planning.pack import pack


def edit_config(path: Path, **changes: object) -> ModelConfig:
    saved = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(saved | changes))
    return ModelConfig(path=path, seq_len=64)


def test_a_loaded_policy_is_deterministic_and_trainable(policy: Policy) -> None:
    assert not policy.training
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in policy.parameters())


def test_parameters_keep_the_names_of_the_model_folder(policy: Policy, bare_model_path: Path) -> None:
    names = {name for name, _ in policy.causal_lm.named_parameters()}
    assert names == set(load_file(bare_model_path / "model.safetensors"))


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


def test_a_sample_cap_beyond_the_models_positions_is_refused(bare_model_path: Path) -> None:
    with pytest.raises(ModelUnusable, match=r"model.seq_len \(1000\) is above the 512 positions"):
        load_policy(ModelConfig(path=bare_model_path, seq_len=1000), CPU)


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


def test_bfloat16_scores_are_near_the_float32_ones(bare_model_path: Path, policy: Policy) -> None:
    half = load_policy(ModelConfig(path=bare_model_path, seq_len=64, dtype="bfloat16"), CPU)
    batch = pack(make_samples([20, 9]), [0, 0], [0, 1])
    scores = half(batch)
    scores.logprobs.sum().backward()
    assert scores.logprobs.dtype == torch.float32
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in half.parameters())
    torch.testing.assert_close(scores.logprobs, policy(batch).logprobs, rtol=0, atol=0.2)
    assert not torch.equal(scores.logprobs, policy(batch).logprobs)


def test_decoder_layers_are_what_transformers_says_must_stay_whole(policy: Policy) -> None:
    assert decoder_layers(policy.causal_lm) == list(policy.causal_lm.model.layers)


def test_a_model_without_known_layers_is_refused(policy: Policy) -> None:
    policy.causal_lm._no_split_modules = []
    with pytest.raises(ModelUnusable, match="does not say which of its modules are decoder layers"):
        decoder_layers(policy.causal_lm)


def test_a_plain_process_needs_no_sharding(policy: Policy) -> None:
    assert shard_policy(policy, None, reshard_after_forward=True) is policy


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_the_image_side_of_a_model_comes_from_its_config(family: str, policies: Policies) -> None:
    assert policies[family].image_spec == SPEC
    assert policies[family].images is not None
    assert policies[family].images.family in FAMILIES


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize(("pack", "sharing"), [(True, RowSharing.ALL), (False, RowSharing.MODALITY)])
def test_samples_share_rows_as_asked(family: str, pack: bool, sharing: RowSharing, policies: Policies) -> None:
    assert validate_multimodal_pack(policies[family].images, pack_multimodal=pack) is sharing


def test_a_model_of_text_has_nothing_to_refuse() -> None:
    assert validate_multimodal_pack(None, pack_multimodal=True) is RowSharing.TEXT


def test_a_vision_model_that_is_not_in_the_table_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    with pytest.raises(UserError, match=r"qwen2_vl is a vision-language model .* knows qwen2_5_vl, qwen3_vl, qwen3_5"):
        load_policy(ModelConfig(path=tmp_path), CPU)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_vision_blocks_are_sharded_like_decoder_layers(family: str, policies: Policies) -> None:
    base = policies[family].causal_lm.base_model
    assert set(decoder_layers(policies[family].causal_lm)) == {*base.visual.blocks, *base.language_model.layers}


def test_a_model_with_positions_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(ModelConfig(path=save_tiny_vlm(tmp_path, "qwen3_vl"), seq_len=16), CPU)
    base = policy.causal_lm.base_model
    original = base.get_rope_index

    def shifted(**inputs: Tensor) -> tuple[Tensor, Tensor]:
        positions, deltas = original(**inputs)
        return positions + 1, deltas

    monkeypatch.setattr(base, "get_rope_index", shifted)
    with pytest.raises(ModelUnusable, match="other positions than this trainer"):
        verify_packing(policy, CPU)


@pytest.mark.parametrize("path", ["text", "qwen3_5", "qwen2_5_vl"])
def test_a_critic_that_does_not_see_as_the_policy_does_is_refused(
    path: str, policies: Policies, model_paths: dict[str, Path], tmp_path: Path
) -> None:
    """A critic of text would take image tokens for text; other families have other positions."""
    paths = model_paths | {"text": save_tiny_model(tmp_path)}
    model = ModelConfig(path=model_paths["qwen3_vl"], seq_len=16)
    with pytest.raises(ModelUnusable, match=r"the model of critic\.path does not see images as the policy does"):
        load_critic(CriticConfig(path=paths[path]), model, policies["qwen3_vl"], CPU)


def gradients(policy: Policy) -> dict[str, Tensor]:
    recorder = GradientRecorder(policy.causal_lm)
    train_scenario(policy, recorder, SCENARIOS["packed"], 0, 1)
    return recorder.gradients


def test_checkpointed_activations_give_the_same_gradients_bit_for_bit(policy: Policy, bare_model_path: Path) -> None:
    config = ModelConfig(path=bare_model_path, seq_len=SEQ_LEN, activation_checkpointing=True)
    checkpointed = load_policy(config, CPU)
    verify_packing(checkpointed, CPU)
    expected = gradients(policy)
    found = gradients(checkpointed)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_each_layer_runs_twice_when_activations_are_checkpointed(bare_model_path: Path) -> None:
    config = ModelConfig(path=bare_model_path, seq_len=SEQ_LEN, activation_checkpointing=True)
    policy = load_policy(config, CPU)
    calls = []
    policy.causal_lm.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    report = train_scenario(policy, GradientRecorder(policy.causal_lm), SCENARIOS["packed"], 0, 1)
    assert len(calls) == 2 * report.metrics["micro_batches/local"]
    assert not any(module.training for module in policy.causal_lm.model.layers[0].mlp.modules())


def test_a_critic_with_a_trunk_of_its_own_checkpoints_its_activations_too(
    policy: Policy, bare_model_path: Path
) -> None:
    config = ModelConfig(path=bare_model_path, seq_len=SEQ_LEN, activation_checkpointing=True)
    critic = load_critic(CriticConfig(), config, policy, CPU)
    assert isinstance(critic, OwnCritic)
    calls = []
    critic.trunk.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    critic(micro_batches_of(SCENARIOS["packed"], 0, 1)[0]).sum().backward()
    assert len(calls) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_give_the_same_gradients(policy: Policy, bare_model_path: Path, checkpointing: bool) -> None:
    config = ModelConfig(path=bare_model_path, seq_len=SEQ_LEN, compile=True, activation_checkpointing=checkpointing)
    expected, compiled = gradients(policy), load_policy(config, CPU)
    verify_packing(compiled, CPU)
    found = gradients(compiled)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_compilation_without_a_compiler_fails_at_start_up(
    bare_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not_compiled(torch.device("cuda")) == "the package triton is not installed"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "gxx-of-nobody")
    with pytest.raises(ModelUnusable, match=r"model\.compile = true cannot work on cpu: no C\+\+ compiler .*gxx-of"):
        load_policy(ModelConfig(path=bare_model_path, seq_len=SEQ_LEN, compile=True), CPU)


NUM_TOKENS, HIDDEN, VOCAB = 57, 16, 101

each_tile = pytest.mark.parametrize("tile", [(5, 3), (10, 7), (57, 101), (8, 200), (256, 25)], ids=str)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (NUM_TOKENS,), generator=generator)
    temperatures = torch.rand(NUM_TOKENS, generator=generator) + 0.5
    return hidden, head, labels, temperatures


def naive(hidden: Tensor, head: Tensor, labels: Tensor, temperatures: Tensor) -> TokenScores:
    distribution = (hidden.double() @ head.double().T / temperatures.double()[:, None]).log_softmax(-1)
    entropies = -(distribution.exp() * distribution).sum(-1)
    return TokenScores(distribution.gather(-1, labels[:, None])[:, 0], entropies)


@each_tile
def test_values_equal_the_plain_head(tile: tuple[int, int]) -> None:
    scores, expected = token_scores(*inputs(), TileSize(*tile)), naive(*inputs())
    torch.testing.assert_close(scores.logprobs.double(), expected.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropies.double(), expected.entropies, rtol=1e-5, atol=1e-5)


@each_tile
@pytest.mark.parametrize(("logprob_scale", "entropy_scale"), [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)])
def test_gradients_equal_the_plain_head(tile: tuple[int, int], logprob_scale: float, entropy_scale: float) -> None:
    upstream = torch.linspace(-1, 2, NUM_TOKENS)

    def gradients(scores: TokenScores, hidden: Tensor, head: Tensor) -> tuple[Tensor, ...]:
        total = logprob_scale * (scores.logprobs * upstream).sum() + entropy_scale * (scores.entropies * upstream).sum()
        return torch.autograd.grad(total, (hidden, head))

    hidden, head, labels, temperatures = inputs()
    ours = gradients(token_scores(hidden, head, labels, temperatures, TileSize(*tile)), hidden, head)
    expected = gradients(naive(hidden, head, labels, temperatures), hidden, head)
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


def test_only_logprobs_in_the_loss_give_the_gradient_of_logprobs() -> None:
    hidden, head, labels, temperatures = inputs()
    token_scores(hidden, head, labels, temperatures).logprobs.sum().backward()
    ours = hidden.grad
    hidden_again, head_again, _, _ = inputs()
    naive(hidden_again, head_again, labels, temperatures).logprobs.sum().backward()
    torch.testing.assert_close(ours, hidden_again.grad, rtol=1e-4, atol=1e-5)


def test_no_tokens_give_no_scores_and_zero_gradients() -> None:
    hidden, head, labels, temperatures = inputs()
    scores = token_scores(hidden[:0], head, labels[:0], temperatures[:0])
    (scores.logprobs.sum() * 0.0).backward()
    assert scores.logprobs.shape == (0,)
    assert head.grad is not None
    assert not head.grad.any()


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head, labels, temperatures = inputs()
    token_scores(hidden, head.detach(), labels, temperatures).logprobs.sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


@each_tile
def test_half_precision_inputs_give_exact_scores_and_half_precision_gradients(tile: tuple[int, int]) -> None:
    hidden, head, labels, temperatures = inputs(torch.bfloat16)
    scores, expected = token_scores(hidden, head, labels, temperatures, TileSize(*tile)), naive(*inputs(torch.bfloat16))
    assert scores.logprobs.dtype == scores.entropies.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs.double(), expected.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropies.double(), expected.entropies, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(scores.logprobs.sum(), (hidden, head))
    theirs = torch.autograd.grad(
        naive(hidden.double(), head.double(), labels, temperatures).logprobs.sum(), (hidden, head)
    )
    for mine, exact in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - exact.double()).norm() <= 0.003 * exact.double().norm()


def test_no_tensor_of_all_logits_is_saved_or_made() -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return result

    hidden, head, labels, temperatures = inputs()
    with Watch():
        token_scores(hidden, head, labels, temperatures, TileSize(8, 20)).logprobs.sum().backward()
    assert largest <= VOCAB * HIDDEN < NUM_TOKENS * VOCAB


def test_large_logits_and_certain_tokens_stay_finite() -> None:
    hidden, head, labels, temperatures = inputs()
    large = (hidden.detach() * 300).requires_grad_()
    scores = token_scores(large, head, labels, temperatures, TileSize(10, 7))
    (scores.logprobs.sum() + scores.entropies.sum()).backward()
    expected = naive(large.detach(), head.detach(), labels, temperatures)
    torch.testing.assert_close(scores.logprobs.double(), expected.logprobs, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(scores.entropies.double(), expected.entropies, rtol=1e-4, atol=1e-3)
    assert large.grad is not None
    assert large.grad.isfinite().all()
