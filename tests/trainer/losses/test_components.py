"""The three components: weights, denominators, units that count alike, and components that no token belongs to."""

import pytest
import torch
from torch import Tensor

from tests.trainer.rank_worker import micro_batches_of
from tests.trainer.scenarios import Scenario, batch_of, make_samples
from trainer.losses.components import (
    MAX_WEIGHT,
    Denominators,
    count_members,
    micro_batch_loss,
    ref_kl_losses,
    rl_inputs,
)
from trainer.losses.protocol import RlInputs, RlOutputs
from trainer.model.logprobs import TokenScores
from trainer.planning.layout import Weighting
from trainer.planning.pack import MicroBatch, pack

CPU = torch.device("cpu")


def denominators(rl: int = 0, ce: int = 0, ref_kl: int = 0) -> Denominators:
    """Of a mini-batch with this many members, every token counting alike."""
    return Denominators.of(torch.tensor([[rl], [ce], [ref_kl]], dtype=torch.float64), CPU)


def scores_for(batch: MicroBatch, value: float = -1.0) -> TokenScores:
    logprobs = torch.full((batch.num_loss_tokens,), value, requires_grad=True)
    return TokenScores(logprobs, torch.zeros(batch.num_loss_tokens))


def weighted_batch() -> MicroBatch:
    samples = batch_of("weighted")
    return pack(samples, [0] * len(samples), range(len(samples)))


def constant_loss(inputs: RlInputs) -> RlOutputs:
    nothing = torch.zeros_like(inputs.logprobs, dtype=torch.bool)
    return RlOutputs(inputs.logprobs * 2.0, nothing, nothing)


def total_weight(weights: Tensor | None) -> float:
    assert weights is not None
    return float(weights.sum())


def test_each_component_is_weighted_and_divided_by_its_own_count() -> None:
    batch = weighted_batch()
    tokens = batch.loss_tokens
    assert tokens.ref_kl_weights is not None
    assert tokens.ref_logprobs is not None
    report = micro_batch_loss(batch, scores_for(batch), constant_loss, denominators(rl=10, ce=20, ref_kl=40))
    weights = (-1.0 - tokens.logprobs).exp().clamp(max=MAX_WEIGHT)
    distances = weights * (-1.0 - tokens.ref_logprobs)
    assert report.parts["rl"].item() == pytest.approx(-2.0 * total_weight(tokens.rl_weights) / 10, rel=1e-5)
    assert report.parts["ce"].item() == pytest.approx(total_weight(tokens.ce_weights) / 20, rel=1e-5)
    assert report.parts["ref_kl"].item() == pytest.approx(
        float((distances * tokens.ref_kl_weights).sum()) / 40, rel=1e-5
    )
    assert report.total.item() == pytest.approx(sum(part.item() for part in report.parts.values()), rel=1e-5)


def test_members_are_tokens_with_a_weight_not_the_sum_of_weights() -> None:
    batch = weighted_batch()
    tokens = batch.loss_tokens
    streams = (tokens.rl_weights, tokens.ce_weights, tokens.ref_kl_weights)
    expected = [int((weights != 0).sum()) for weights in streams if weights is not None]
    assert count_members([batch], 1)[:, 0].tolist() == expected
    assert count_members([batch, batch, pack([], [], [])], 1)[:, 0].tolist() == [2 * n for n in expected]


def test_a_component_without_tokens_is_not_computed() -> None:
    batch = pack(make_samples([8]), [0], [0])
    report = micro_batch_loss(batch, scores_for(batch), constant_loss, denominators(rl=4))
    assert report.parts.keys() == {"rl"}


def test_an_rl_loss_is_not_called_for_a_dummy_whose_loss_is_zero_but_has_a_gradient() -> None:
    def never(inputs: RlInputs) -> RlOutputs:
        raise AssertionError(f"called with {inputs}")

    dummy = pack([], [], [])
    report = micro_batch_loss(dummy, scores_for(dummy), never, denominators(rl=4))
    assert report.total.item() == 0
    assert report.total.requires_grad
    assert report.rl is None


@pytest.mark.parametrize("weighting", Weighting)
@pytest.mark.parametrize("world_size", [1, 3])
def test_shares_of_all_tokens_on_all_ranks_add_up_to_one_and_units_count_alike(
    weighting: Weighting, world_size: int
) -> None:
    scenario = Scenario("branched", cap=32, weighting=weighting)
    samples = batch_of("branched")
    names = {
        "token": [""] * len(samples),
        "sample": [str(row) for row in range(len(samples))],
        "trajectory": [sample.trajectory_id for sample in samples],
        "group": [sample.group_id for sample in samples],
    }[weighting]
    ranks = [micro_batches_of(scenario, rank, world_size) for rank in range(world_size)]
    num_units = len(set(names))
    shares = Denominators.of(sum(count_members(batches, num_units) for batches in ranks), CPU).shares[0]
    by_unit: dict[str, float] = {}
    for batch in (batch for batches in ranks for batch in batches):
        for segment, unit in zip(batch.loss_tokens.segments.tolist(), batch.token_units.tolist(), strict=True):
            name = names[batch.sample_rows[segment]]
            by_unit[name] = by_unit.get(name, 0.0) + float(shares[unit])
    assert by_unit == pytest.approx(dict.fromkeys(names, 1 / num_units), rel=1e-5)


def test_units_without_members_do_not_thin_out_the_others() -> None:
    members = torch.tensor([[4.0, 0.0, 2.0], [0.0, 0.0, 0.0], [0.0, 3.0, 0.0]], dtype=torch.float64)
    result = Denominators.of(members, CPU)
    assert result.shares.flatten().tolist() == pytest.approx([1 / 8, 0, 1 / 4, 0, 0, 0, 0, 1 / 3, 0])
    assert result.present == {"rl", "ref_kl"}


def test_the_rl_loss_is_told_which_tokens_are_its_own() -> None:
    batch = weighted_batch()
    inputs = rl_inputs(batch, scores_for(batch))
    assert batch.loss_tokens.rl_weights is not None
    assert inputs.members.tolist() == [weight != 0 for weight in batch.loss_tokens.rl_weights.tolist()]
    assert 0 < inputs.members.sum() < len(inputs.members)


def expected_ref_kl(behaviour: Tensor, policy_logits: Tensor, reference: Tensor) -> tuple[float, Tensor]:
    """(mean loss, gradient by logits) over all tokens of a small vocabulary, each as often as it is sampled."""
    logits = policy_logits.clone().requires_grad_()
    losses = ref_kl_losses(logits.log_softmax(0), behaviour.log(), reference.log())
    mean = (behaviour * losses).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    return float(mean.detach()), gradient


@pytest.mark.parametrize("is_on_policy", [True, False])
def test_ref_kl_has_value_and_gradient_of_the_divergence_from_policy_to_reference(is_on_policy: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64)
    reference = torch.randn(7, dtype=torch.float64).softmax(0)
    behaviour = logits.softmax(0) if is_on_policy else (logits + 0.3 * torch.randn(7)).softmax(0)
    exact_logits = logits.clone().requires_grad_()
    policy = exact_logits.softmax(0)
    divergence = (policy * (policy.log() - reference.log())).sum()
    (exact,) = torch.autograd.grad(divergence, exact_logits)
    value, gradient = expected_ref_kl(behaviour, logits, reference)
    assert value == pytest.approx(float(divergence.detach()), rel=1e-9)
    assert torch.allclose(gradient, exact, rtol=1e-9, atol=1e-12)


def test_ref_kl_holds_the_weight_of_a_token_that_was_hardly_ever_sampled() -> None:
    logprobs = torch.tensor([-0.1], requires_grad=True)
    losses = ref_kl_losses(logprobs, torch.tensor([-30.0]), torch.tensor([-1.1]))
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert gradient.item() == pytest.approx(MAX_WEIGHT * 1.0, rel=1e-5)
