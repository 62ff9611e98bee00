"""The checks of a loss, of packed rows and of the weights (canary): what is sound passes, what is not is named.

Losses as a user might write them: one that keeps every promise, and one for each way of breaking one.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from runtime.errors import UserError
from tests.support.ranks import RankRun
from tests.trainer.rank_worker import CPU
from tests.trainer.scenarios import LOSSES
from trainer.checks.canary import make_canary
from trainer.checks.loss import SPLITS, Split, batch_gradient, check_loss, random_samples
from trainer.checks.packing import verify_packing
from trainer.cli import run
from trainer.errors import ModelUnusable
from trainer.losses.factory import CustomLoss, make_loss
from trainer.losses.protocol import RlInputs, RlOutputs
from trainer.model.attention import AttentionKernel
from trainer.model.policy import Policy
from trainer.planning.pack import SegmentInfo


def good(inputs: RlInputs, *, scale: float = 1.0) -> RlOutputs:
    return _outputs(inputs, -inputs.advantages * inputs.ratio * scale)


def normalised_by_its_own_length(inputs: RlInputs) -> RlOutputs:
    return _outputs(inputs, -inputs.advantages * inputs.logprobs / len(inputs.logprobs))


def whitened_over_the_row(inputs: RlInputs) -> RlOutputs:
    centred = inputs.advantages - inputs.advantages.mean()
    return _outputs(inputs, -centred * inputs.logprobs)


def first_sample_only(inputs: RlInputs) -> RlOutputs:
    return _outputs(inputs, -inputs.advantages * inputs.logprobs * (inputs.segments == 0))


def unbounded(inputs: RlInputs) -> RlOutputs:
    return _outputs(inputs, -inputs.advantages * (10 * inputs.log_ratio).exp())


def sees_strangers(inputs: RlInputs) -> RlOutputs:
    everybody = replace(inputs, members=torch.ones_like(inputs.members))
    return _outputs(inputs, -inputs.advantages * inputs.logprobs * everybody.segment_mean(inputs.behaviour_logprobs))


def changes_its_inputs(inputs: RlInputs) -> RlOutputs:
    inputs.advantages.mul_(2.0)
    return good(inputs)


def draws_lots(inputs: RlInputs) -> RlOutputs:
    return _outputs(inputs, -inputs.advantages * inputs.logprobs * torch.rand_like(inputs.logprobs))


def without_gradient(inputs: RlInputs) -> RlOutputs:
    return _outputs(inputs, -inputs.advantages * inputs.logprobs.detach())


def one_number(inputs: RlInputs) -> RlOutputs:
    return _outputs(inputs, (-inputs.advantages * inputs.logprobs).mean())


def raises(inputs: RlInputs) -> RlOutputs:
    raise KeyError("no such thing")


BROKEN: dict[Callable[[RlInputs], RlOutputs], str] = {
    normalised_by_its_own_length: "packing",
    whitened_over_the_row: "packing",
    first_sample_only: "order",
    unbounded: "finite",
    sees_strangers: "members",
    changes_its_inputs: "pure",
    draws_lots: "pure",
    without_gradient: "shape",
    one_number: "shape",
    raises: "shape",
}
"""The promise that each of them breaks, among others."""


def _outputs(inputs: RlInputs, losses: Tensor) -> RlOutputs:
    nothing = torch.zeros_like(inputs.members)
    return RlOutputs(losses, nothing, nothing)


MODULE = __name__


@pytest.mark.parametrize("name", LOSSES)
def test_built_in_losses_keep_every_promise(name: str) -> None:
    failed = [check for check in check_loss(CustomLoss(name, make_loss(LOSSES[name]))) if not check.passed]
    assert not failed


def test_a_good_loss_of_the_user_passes() -> None:
    assert all(check.passed for check in check_loss(CustomLoss("good", good)))


@pytest.mark.parametrize("loss", BROKEN, ids=lambda loss: loss.__name__)
def test_a_broken_promise_is_named(loss: Callable[[RlInputs], RlOutputs]) -> None:
    failed = [check.name.partition(":")[0] for check in check_loss(CustomLoss(loss.__name__, loss)) if not check.passed]
    assert BROKEN[loss] in failed


def test_a_loss_that_raises_fails_with_its_message_and_does_not_end_the_suite() -> None:
    checks = list(check_loss(CustomLoss("raises", raises)))
    assert len(checks) == len(SPLITS) + 4
    assert {check.detail for check in checks} == {"KeyError: 'no such thing'"}


def test_the_probe_has_the_gradient_of_the_plain_mean() -> None:
    """The mean of -A x logprob over all trained tokens, without plan, packing or denominators."""
    samples = random_samples()
    actual = batch_gradient(make_loss(LOSSES["reinforce"]), samples, Split(world_size=2, cap=24))
    table = torch.randn(13, 13, generator=torch.Generator().manual_seed(4)).mul_(0.5).requires_grad_()
    losses = []
    for sample in samples:
        tokens = torch.from_numpy(sample.token_ids.numpy()).long()
        logprobs = table[tokens[:-1]].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        losses.append(-sample.advantages * logprobs[torch.from_numpy(sample.loss_mask.numpy()[1:].copy())])
    (expected,) = torch.autograd.grad(torch.cat(losses).mean(), table)
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_the_command_prints_a_table_and_says_ok(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check-loss", f"{MODULE}:good", "--kwargs", '{"scale": 2.0}']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{MODULE}:good: {len(SPLITS) + 4} of {len(SPLITS) + 4} checks passed"
    assert all(line.startswith("ok ") for line in lines[:-1])


def test_the_command_fails_for_a_loss_that_breaks_a_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check-loss", f"{MODULE}:normalised_by_its_own_length"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  packing: one sample per micro batch" in out
    assert "the gradient changes by" in out


def test_a_loss_that_is_not_found_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="no_such_loss"):
        run(["check-loss", f"{MODULE}:no_such_loss"])
    with pytest.raises(UserError, match="import_path is required"):
        run(["check-loss"])


def test_canary_is_the_likeliest_tokens_log_probability_after_each_prefix(
    policy: Policy, bare_model_path: Path
) -> None:
    canary = make_canary(policy)
    canary.check()
    reference = AutoModelForCausalLM.from_pretrained(bare_model_path, dtype=torch.float32).eval()
    prompt = torch.from_numpy(canary.token_ids.numpy().astype(np.int64))
    for length, logprob in zip(canary.lengths.numpy().tolist(), canary.logprobs.numpy().tolist(), strict=True):
        with torch.no_grad():
            logits = reference(input_ids=prompt[None, :length], use_cache=False).logits[0, -1]
        assert logprob == pytest.approx(float(torch.log_softmax(logits, dim=-1).max()), abs=1e-4)


def test_other_weights_have_another_canary(policy: Policy) -> None:
    before = make_canary(policy)
    assert make_canary(policy) == before
    with torch.no_grad():
        policy.causal_lm.get_output_embeddings().weight.mul_(1.5)
    assert np.abs(make_canary(policy).logprobs.numpy() - before.logprobs.numpy()).max() > 1e-3


@pytest.mark.integration
def test_canary_does_not_depend_on_the_number_of_ranks(rank_run: RankRun, policy: Policy) -> None:
    alone = make_canary(policy).logprobs.numpy().tolist()
    for rank in range(rank_run.world_size):
        assert rank_run.results(rank)["canary"]["logprobs"] == pytest.approx(alone, abs=1e-4)


def test_the_packing_check_passes_for_a_sound_model(policy: Policy) -> None:
    verify_packing(policy, CPU)
    assert all(parameter.grad is None for parameter in policy.parameters())


def leaky(q: Tensor, k: Tensor, v: Tensor, segments: SegmentInfo, scaling: float | None, window: int | None) -> Tensor:
    """Causal over the whole row, as if it were one sample."""
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_packing_check_catches_a_kernel_that_lets_samples_see_each_other(
    bare_model_path: Path, dtype: torch.dtype
) -> None:
    kernel = AttentionKernel("leaky", leaky)
    kernel.install()
    model = AutoModelForCausalLM.from_pretrained(bare_model_path, attn_implementation=kernel.implementation)
    with pytest.raises(ModelUnusable, match="Qwen3ForCausalLM cannot be trained packed"):
        verify_packing(Policy(model, dtype), CPU)
