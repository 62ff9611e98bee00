"""The built-in `rl` losses, token by token: who is masked, with what value and what gradient; and the custom one."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from runtime.errors import UserError
from tests.trainer.scenarios import LOSSES
from trainer.config.loss import (
    CispoLossConfig,
    CustomLossConfig,
    DppoLossConfig,
    GrpoClipHigherLossConfig,
    GspoLossConfig,
    IpoLossConfig,
    LossConfig,
    PpoClipLossConfig,
    ReinforceLossConfig,
)
from trainer.errors import LossInvalid
from trainer.losses import builtin
from trainer.losses.factory import make_loss
from trainer.losses.protocol import MAX_LOG_RATIO, RlInputs, RlLoss, RlOutputs

DPPO = partial(builtin.dppo, delta_low=0.2, delta_high=0.3, kl_coef=0.0)


def token(probability: float, behaviour: float, advantage: float) -> RlInputs:
    """One trained token."""
    return RlInputs(
        logprobs=torch.tensor([probability]).log().requires_grad_(),
        behaviour_logprobs=torch.tensor([behaviour]).log(),
        advantages=torch.tensor([advantage]),
        members=torch.tensor([True]),
        segments=torch.tensor([0]),
        num_segments=1,
    )


def gradient_of(loss: RlLoss, inputs: RlInputs) -> float:
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
    loss = partial(builtin.dppo, delta_low=0.2, delta_high=0.3, kl_coef=0.5)
    log_ratio = math.log(0.9 / 0.5)
    inputs = token(0.9, 0.5, +1.0)
    assert loss(inputs).is_masked.item()
    assert loss(inputs).losses.item() == pytest.approx(0.5 * log_ratio**2, rel=1e-5)
    assert gradient_of(loss, inputs) == pytest.approx(log_ratio, rel=1e-5)


def test_dppo_on_policy_is_the_plain_policy_gradient() -> None:
    loss = partial(builtin.dppo, delta_low=0.2, delta_high=0.2, kl_coef=1e-3)
    assert gradient_of(loss, token(0.3, 0.3, 1.7)) == pytest.approx(-1.7, rel=1e-5)


def test_a_huge_ratio_stays_finite() -> None:
    inputs = replace(token(0.5, 0.5, -1.0), behaviour_logprobs=torch.tensor([-500.0]))
    assert inputs.ratio.item() == pytest.approx(math.exp(MAX_LOG_RATIO))
    for config in LOSSES.values():
        loss = make_loss(config)
        assert math.isfinite(loss(inputs).losses.item()), config.type
        assert math.isfinite(gradient_of(loss, inputs)), config.type


@pytest.mark.parametrize(
    ("probability", "behaviour", "advantage", "high", "low"),
    [
        (0.9, 0.5, +1.0, True, False),
        (0.9, 0.5, -1.0, True, False),  # would be pulled back, and is masked all the same
        (0.1, 0.5, -1.0, False, True),
        (0.1, 0.5, +1.0, False, True),
        (0.6, 0.5, +1.0, False, False),
    ],
)
def test_ipo_masks_by_distance_alone(
    probability: float, behaviour: float, advantage: float, high: bool, low: bool
) -> None:
    loss, inputs = partial(builtin.ipo, delta=0.2, kl_coef=0.0), token(probability, behaviour, advantage)
    outputs = loss(inputs)
    assert (outputs.is_masked_high.item(), outputs.is_masked_low.item()) == (high, low)
    expected = 0.0 if high or low else -advantage * probability / behaviour
    assert gradient_of(loss, inputs) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "high", "low"),
    [
        (1.5, +2.0, -2.0 * 1.3, True, False),  # the limit wins: its value, no gradient
        (1.5, -2.0, +2.0 * 1.5, False, False),  # pulled back: unlimited
        (0.5, -2.0, +2.0 * 0.8, False, True),
        (0.5, +2.0, -2.0 * 0.5, False, False),
        (1.2, +2.0, -2.0 * 1.2, False, False),
    ],
)
def test_the_clipped_surrogate_is_the_larger_loss(
    ratio: float, advantage: float, value: float, high: bool, low: bool
) -> None:
    loss = partial(builtin.grpo_clip_higher, epsilon_low=0.2, epsilon_high=0.3)
    inputs = token(0.4 * ratio, 0.4, advantage)
    outputs = loss(inputs)
    assert outputs.losses.item() == pytest.approx(value, rel=1e-5)
    assert value == pytest.approx(max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.3)))
    assert (outputs.is_masked_high.item(), outputs.is_masked_low.item()) == (high, low)
    assert gradient_of(loss, inputs) == pytest.approx(0.0 if high or low else value, rel=1e-5)


def two_samples() -> RlInputs:
    """Samples of 3 and 2 tokens; the second token of the first is no member and has a wild ratio."""
    log_ratio = torch.tensor([0.3, 9.0, -0.1, -0.4, 0.0])
    logprobs = torch.tensor([-1.0, -0.5, -2.0, -1.5, -0.7])
    return RlInputs(
        logprobs=logprobs.requires_grad_(),
        behaviour_logprobs=logprobs.detach() - log_ratio,
        advantages=torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0]),
        members=torch.tensor([True, False, True, True, True]),
        segments=torch.tensor([0, 0, 0, 1, 1]),
        num_segments=2,
    )


def test_gspo_has_one_ratio_per_sample_over_its_member_tokens() -> None:
    loss, inputs = partial(builtin.gspo, epsilon_low=0.5, epsilon_high=0.5), two_samples()
    first, second = math.exp((0.3 - 0.1) / 2), math.exp((-0.4 + 0.0) / 2)
    losses = loss(inputs).losses
    assert losses[[0, 2, 3, 4]].tolist() == pytest.approx([-first, -first, 2 * second, 2 * second], rel=1e-5)
    (gradient,) = torch.autograd.grad(losses[inputs.members].sum(), inputs.logprobs)
    assert gradient.tolist() == pytest.approx([-first, 0.0, -first, 2 * second, 2 * second], rel=1e-5)


def test_gspo_masks_whole_samples() -> None:
    outputs = builtin.gspo(two_samples(), epsilon_low=0.1, epsilon_high=0.05)
    assert outputs.is_masked_high.tolist() == [True, True, True, False, False]
    assert outputs.is_masked_low.tolist() == [False, False, False, True, True]


def test_gspo_of_a_sample_without_members_is_finite() -> None:
    inputs = replace(two_samples(), members=torch.tensor([False, False, False, True, True]))
    assert torch.isfinite(builtin.gspo(inputs, epsilon_low=0.1, epsilon_high=0.1).losses).all()


@pytest.mark.parametrize(
    ("ratio", "weight", "high", "low"),
    [(3.0, 2.0, True, False), (0.2, 0.5, False, True), (1.7, 1.7, False, False)],
)
def test_cispo_holds_the_weight_and_keeps_the_gradient(ratio: float, weight: float, high: bool, low: bool) -> None:
    loss, inputs = partial(builtin.cispo, epsilon_low=0.5, epsilon_high=1.0), token(0.2 * ratio, 0.2, advantage=1.5)
    outputs = loss(inputs)
    assert (outputs.is_masked_high.item(), outputs.is_masked_low.item()) == (high, low)
    assert gradient_of(loss, inputs) == pytest.approx(-1.5 * weight, rel=1e-5)


def test_reinforce_ignores_the_behaviour_policy() -> None:
    inputs = token(0.9, 0.001, 1.5)
    assert gradient_of(builtin.reinforce, inputs) == gradient_of(builtin.reinforce, token(0.9, 0.9, 1.5)) == -1.5
    assert not builtin.reinforce(inputs).is_masked.item()


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_the_plain_policy_gradient_on_policy(name: str) -> None:
    assert gradient_of(make_loss(LOSSES[name]), token(0.3, 0.3, 1.7)) == pytest.approx(-1.7, rel=1e-5)


@pytest.mark.parametrize(
    ("config_class", "function", "limits"),
    [
        (DppoLossConfig, builtin.dppo, {"delta_low": 0.1, "delta_high": 0.4, "kl_coef": 0.01}),
        (IpoLossConfig, builtin.ipo, {"delta": 0.3, "kl_coef": 0.02}),
        (PpoClipLossConfig, builtin.ppo_clip, {"epsilon": 0.15}),
        (GrpoClipHigherLossConfig, builtin.grpo_clip_higher, {"epsilon_low": 0.1, "epsilon_high": 0.5}),
        (GspoLossConfig, builtin.gspo, {"epsilon_low": 0.01, "epsilon_high": 0.02}),
        (CispoLossConfig, builtin.cispo, {"epsilon_low": 0.3, "epsilon_high": 2.0}),
        (ReinforceLossConfig, builtin.reinforce, {}),
    ],
)
def test_factory_passes_the_configured_limits(
    config_class: Callable[..., LossConfig], function: Callable[..., RlOutputs], limits: dict[str, float]
) -> None:
    loss = make_loss(config_class(**limits))
    assert isinstance(loss, partial)
    assert (loss.func, loss.keywords) == (function, limits)


def scaled(inputs: RlInputs, *, scale: float = 1.0) -> RlOutputs:
    nothing = torch.zeros_like(inputs.members)
    return RlOutputs(-inputs.advantages * inputs.logprobs * scale, nothing, nothing)


def summed(inputs: RlInputs) -> RlOutputs:
    return replace(scaled(inputs), losses=scaled(inputs).losses.sum())


def with_float_mask(inputs: RlInputs) -> RlOutputs:
    return replace(scaled(inputs), is_masked_low=torch.zeros_like(inputs.logprobs))


def not_outputs(inputs: RlInputs) -> Tensor:
    return inputs.logprobs


def custom(name: str, **kwargs: float) -> RlLoss:
    return make_loss(CustomLossConfig(import_path=f"{__name__}:{name}", kwargs=dict(kwargs)))


def test_a_custom_loss_is_found_by_path_and_gets_its_arguments() -> None:
    assert gradient_of(custom("scaled", scale=3.0), token(0.3, 0.3, 1.5)) == pytest.approx(-4.5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("summed", r"losses of .*:summed must be float32\[1\], one entry per trained token, got float32\[\]"),
        ("with_float_mask", r"is_masked_low of .* must be bool\[1\].* got float32\[1\]"),
        ("not_outputs", "must return RlOutputs, got Tensor"),
    ],
)
def test_a_custom_loss_that_breaks_the_protocol_is_named(name: str, message: str) -> None:
    with pytest.raises(LossInvalid, match=message):
        custom(name)(token(0.3, 0.3, 1.0))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:loss", "No module named 'no_such_module'.*PYTHONPATH"),
        (f"{__name__}:no_such_loss", "no_such_loss"),
        (f"{__name__}:LOSSES", "is a dict, not a function"),
    ],
)
def test_a_custom_loss_that_is_not_there_is_the_users_mistake(path: str, message: str) -> None:
    with pytest.raises(LossInvalid, match=message) as caught:
        make_loss(CustomLossConfig(import_path=path))
    assert isinstance(caught.value, UserError)


def test_arguments_that_a_custom_loss_does_not_take_are_found_at_start_up() -> None:
    with pytest.raises(LossInvalid, match="unexpected keyword argument 'sale'"):
        custom("scaled", sale=3.0)
