"""`dppo` and the three components: signs of the mask, values, denominators, and components that no token belongs to."""

import math

import pytest
import torch
from torch import Tensor

from tests.trainer.core.scenarios import SEQ_LEN, batch_of
from tests.trainer.core.tiny import make_samples
from trainer.config import DppoLossConfig
from trainer.denominators import Denominators, count_members
from trainer.logprobs import TokenScores
from trainer.losses.components import micro_batch_loss
from trainer.losses.dppo import DppoLoss
from trainer.losses.factory import make_loss
from trainer.losses.protocol import MAX_LOG_RATIO, RlInputs, RlOutputs
from trainer.micro_batch import MicroBatch
from trainer.packing import pack

DPPO = DppoLoss(delta_low=0.2, delta_high=0.3, kl_coef=0.0)


def token(probability: float, behaviour: float, advantage: float) -> RlInputs:
    """One trained token."""
    return RlInputs(
        logprobs=torch.tensor([probability]).log().requires_grad_(),
        behaviour_logprobs=torch.tensor([behaviour]).log(),
        advantages=torch.tensor([advantage]),
        segments=torch.tensor([0]),
        num_segments=1,
    )


def gradient_of(loss: DppoLoss, inputs: RlInputs) -> float:
    (gradient,) = torch.autograd.grad(loss(inputs).losses.sum(), inputs.logprobs)
    return float(gradient)


@pytest.mark.parametrize(
    ("probability", "behaviour", "advantage", "high", "low"),
    [
        (0.9, 0.5, +1.0, True, False),  # rose too far, pushed further up
        (0.9, 0.5, -1.0, False, False),  # rose too far, pulled back: keeps its gradient
        (0.1, 0.5, -1.0, False, True),  # fell too far, pushed further down
        (0.1, 0.5, +1.0, False, False),  # fell too far, pulled back
        (0.7, 0.5, +1.0, False, False),  # rose by less than delta_high
        (0.4, 0.5, -1.0, False, False),  # fell by less than delta_low
        (0.9, 0.5, 0.0, False, False),  # nothing pushes
        (0.02, 0.001, +1.0, False, False),  # ratio of 20, but hardly any probability
    ],
)
def test_dppo_masks_what_is_pushed_further_out(
    probability: float, behaviour: float, advantage: float, high: bool, low: bool
) -> None:
    inputs = token(probability, behaviour, advantage)
    outputs = DPPO(inputs)
    assert (outputs.is_masked_high.item(), outputs.is_masked_low.item()) == (high, low)
    assert outputs.is_masked.item() is (high or low)
    expected = 0.0 if high or low else -advantage * probability / behaviour
    assert gradient_of(DPPO, inputs) == pytest.approx(expected, rel=1e-5)


def test_dppo_limits_for_falling_and_rising_differ() -> None:
    assert not DPPO(token(0.75, 0.5, +1.0)).is_masked.item()
    assert DPPO(token(0.25, 0.5, -1.0)).is_masked.item()


def test_dppo_adds_the_squared_log_ratio_also_where_masked() -> None:
    loss = DppoLoss(0.2, 0.3, kl_coef=0.5)
    log_ratio = math.log(0.9 / 0.5)
    inputs = token(0.9, 0.5, +1.0)
    assert loss(inputs).is_masked.item()
    assert loss(inputs).losses.item() == pytest.approx(0.5 * log_ratio**2, rel=1e-5)
    assert gradient_of(loss, inputs) == pytest.approx(log_ratio, rel=1e-5)


def test_dppo_on_policy_is_the_plain_policy_gradient() -> None:
    assert gradient_of(DppoLoss(0.2, 0.2, 1e-3), token(0.3, 0.3, 1.7)) == pytest.approx(-1.7, rel=1e-5)


def test_a_huge_ratio_stays_finite() -> None:
    inputs = RlInputs(torch.tensor([-0.1]), torch.tensor([-500.0]), torch.tensor([-1.0]), torch.tensor([0]), 1)
    assert inputs.ratio.item() == pytest.approx(math.exp(MAX_LOG_RATIO))
    assert math.isfinite(DPPO(inputs).losses.item())


def test_factory_passes_the_configured_limits() -> None:
    loss = make_loss(DppoLossConfig(delta_low=0.1, delta_high=0.4, kl_coef=0.01))
    assert loss == DppoLoss(delta_low=0.1, delta_high=0.4, kl_coef=0.01)


def scores_for(batch: MicroBatch, value: float = -1.0) -> TokenScores:
    logprobs = torch.full((batch.num_loss_tokens,), value, requires_grad=True)
    return TokenScores(logprobs, torch.zeros(batch.num_loss_tokens))


def weighted_batch() -> MicroBatch:
    samples = batch_of("weighted")
    return pack(samples, [0] * len(samples), range(len(samples)), SEQ_LEN)


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
    report = micro_batch_loss(batch, scores_for(batch), constant_loss, Denominators(rl=10, ce=20, ref_kl=40))
    distances = 0.5 * (-1.0 - tokens.ref_logprobs) ** 2
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
    assert count_members([batch]).tolist() == expected
    assert count_members([batch, batch, pack([], [], [], SEQ_LEN)]).tolist() == [2 * count for count in expected]


def test_a_component_without_tokens_is_not_computed() -> None:
    batch = pack(make_samples([8]), [0], [0], SEQ_LEN)
    report = micro_batch_loss(batch, scores_for(batch), constant_loss, Denominators(rl=4, ce=0, ref_kl=0))
    assert report.parts.keys() == {"rl"}


def test_an_rl_loss_is_not_called_for_a_dummy_whose_loss_is_zero_but_has_a_gradient() -> None:
    def never(inputs: RlInputs) -> RlOutputs:
        raise AssertionError(f"called with {inputs}")

    dummy = pack([], [], [], SEQ_LEN)
    report = micro_batch_loss(dummy, scores_for(dummy), never, Denominators(rl=4, ce=0, ref_kl=0))
    assert report.total.item() == 0
    assert report.total.requires_grad
    assert report.rl is None
