"""Packed attention equals each sample alone, lets nothing through between samples, and is chosen loudly."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from runtime.config.config import parse_config
from runtime.errors import UserError
from tests.trainer.rank_worker import CPU
from tests.trainer.reference import load_reference, sample_logprobs
from tests.trainer.scenarios import make_samples, save_tiny_model
from trainer.checks.packing import forward_per_segment
from trainer.config.model import ModelConfig
from trainer.config.trainer import TrainerConfig
from trainer.errors import AttentionUnavailable, ModelUnusable
from trainer.model.attention import (
    KERNELS,
    AttentionKernel,
    attention_function,
    choose_kernel,
    segment_sdpa,
    torch_varlen,
)
from trainer.model.policy import Policy, load_policy
from trainer.planning.pack import SegmentInfo, pack

LENGTHS = [13, 2, 30, 7, 21]
SEGMENTS = SegmentInfo.of((5, 1, 9), CPU)


def packed_scores(policy: Policy, pad_multiple: int = 1) -> Tensor:
    samples = make_samples(LENGTHS)
    return policy(pack(samples, [0] * 5, range(5), pad_multiple)).logprobs


def attention_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 15, 8, generator=generator) for heads in (4, 2, 2))
    return query, key, value


def naive_attention(query: Tensor, key: Tensor, value: Tensor, start: int, end: int, window: int | None) -> Tensor:
    """One segment, with a dense mask and repeated key/value heads."""
    q, k, v = query[0, :, start:end], *(x[0, :, start:end].repeat_interleave(2, dim=0) for x in (key, value))
    distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None]
    allowed = (distance >= 0) & (distance < (window or end))
    weights = (q @ k.transpose(1, 2) * 0.3).masked_fill(~allowed, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_segment_sdpa_equals_dense_attention_of_each_segment(window: int | None) -> None:
    query, key, value = attention_inputs()
    out = segment_sdpa(query, key, value, SEGMENTS, scaling=0.3, window=window)
    expected = [naive_attention(query, key, value, start, end, window) for start, end in ((0, 5), (5, 6), (6, 15))]
    torch.testing.assert_close(out[0], torch.cat(expected), rtol=1e-5, atol=1e-6)


def test_packed_scores_equal_each_sample_alone(policy: Policy) -> None:
    alone = forward_per_segment(policy, make_samples(LENGTHS), CPU).logprobs
    torch.testing.assert_close(packed_scores(policy), alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed_scores(policy, pad_multiple=16), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"use_sliding_window": True}])
def test_packed_scores_equal_eager_attention_of_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    path = save_tiny_model(tmp_path, **changes)
    if "use_sliding_window" in changes:
        saved = json.loads((path / "config.json").read_text())
        saved |= {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2}
        (path / "config.json").write_text(json.dumps(saved))
    reference = load_reference(path)
    expected = []
    for sample in make_samples(LENGTHS):
        logprobs, _ = sample_logprobs(reference, sample, 64)
        expected.append(logprobs[torch.from_numpy(sample.loss_mask.numpy()[1:].copy())])
    scores = packed_scores(load_policy(ModelConfig(path=path, seq_len=64), CPU))
    torch.testing.assert_close(scores.double(), torch.cat(expected), rtol=0, atol=1e-5)


def test_no_gradient_crosses_a_boundary(policy: Policy) -> None:
    """Only tokens of the sample itself, up to the one before, can change a score."""
    batch = pack(make_samples(LENGTHS), [0] * 5, range(5))
    embedding = policy.causal_lm.get_input_embeddings()
    seen: list[Tensor] = []
    handle = embedding.register_forward_hook(lambda _module, _args, output: seen.append(output))
    scores = policy(batch)
    handle.remove()
    of_third = scores.logprobs[batch.loss_tokens.segments == 2]
    (gradient,) = torch.autograd.grad(of_third.sum(), seen[0])
    touched = gradient[0].abs().sum(-1) > 0
    start = sum(LENGTHS[:2])
    assert touched[start : start + 29].all()
    assert not touched[:start].any()
    assert not touched[start + 29 :].any()


def test_changing_one_sample_leaves_its_neighbours_bit_equal(policy: Policy) -> None:
    batch = pack(make_samples(LENGTHS), [0] * 5, range(5))
    changed_ids = batch.token_ids.clone()
    changed_ids[15:45] = 1
    before, after = policy(batch).logprobs, policy(replace(batch, token_ids=changed_ids)).logprobs
    others = batch.loss_tokens.segments != 2
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])


def test_segment_info_counts_from_zero() -> None:
    assert SEGMENTS.cu_seqlens.tolist() == [0, 5, 6, 15]
    assert SEGMENTS.cu_seqlens.dtype == torch.int32
    assert SEGMENTS.max_len == 9


@pytest.mark.parametrize("seq_lens", [(), (3, 0)])
def test_empty_segments_are_refused(seq_lens: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        SegmentInfo.of(seq_lens, CPU)


def test_auto_takes_segment_sdpa_on_a_cpu() -> None:
    assert choose_kernel("auto", CPU, torch.float32).name == "segment_sdpa"


def test_a_gpu_kernel_on_a_cpu_fails_with_the_reason() -> None:
    with pytest.raises(
        AttentionUnavailable, match=r"torch_varlen.*cannot run on cpu: it has no CPU kernel; usable here: auto, seg"
    ):
        choose_kernel("torch_varlen", CPU, torch.bfloat16)


def test_a_gpu_kernel_says_which_precision_it_needs() -> None:
    varlen, _ = KERNELS
    gpu = torch.device("cuda", 0)
    assert varlen.why_unusable(gpu, torch.float32) == "it needs model.dtype = 'bfloat16', not float32"
    assert varlen.why_unusable(gpu, torch.bfloat16) is None


@pytest.mark.parametrize("name", ["flash_attn", "flex", "magic"])
def test_an_unknown_kernel_is_answered_with_the_known_ones(name: str) -> None:
    flags = ["--model.path", "model", "--model.attention", name]
    with pytest.raises(UserError, match=r"model.attention.*'auto', 'segment_sdpa' or 'torch_varlen'"):
        parse_config(TrainerConfig, flags, prog="trainer")


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_what_changes_the_result_and_is_not_implemented_is_refused(name: str) -> None:
    attend, inputs = attention_function(segment_sdpa), attention_inputs()
    attend(torch.nn.Identity(), *inputs, None, segments=SEGMENTS, **{name: None}, position_ids=1)
    with pytest.raises(ModelUnusable, match=name):
        attend(torch.nn.Identity(), *inputs, None, segments=SEGMENTS, **{name: 30.0})


def test_gpu_kernels_get_one_half_type_where_autocast_leaves_float32(
    bare_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a plain process norms and rotations make float32 of queries and keys, which these kernels would refuse."""
    types = []

    def varlen(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        types.append({query.dtype, key.dtype, value.dtype})
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    kernel = AttentionKernel("varlen_anywhere", torch_varlen)
    kernel.install()
    model = AutoModelForCausalLM.from_pretrained(bare_model_path, attn_implementation=kernel.implementation)
    packed_scores(Policy(model, torch.bfloat16))
    assert types == [{torch.bfloat16}] * model.config.num_hidden_layers
