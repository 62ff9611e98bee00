"""The built-in `rl` losses, by the names of the config, which passes its other keys as keyword arguments."""

import torch
from torch import Tensor

from trainer.losses.protocol import RlInputs, RlOutputs, bounded_exp


def dppo(inputs: RlInputs, *, delta_low: float, delta_high: float, kl_coef: float) -> RlOutputs:
    """-advantage x ratio where not masked, plus kl_coef x (log ratio)^2 everywhere.

    A ratio of 2 is nothing at p = 1e-4 and a revolution at p = 0.4, so the trust region is on p, not on the ratio. Only
    a token that the advantage would push further out is masked; one that it pulls back keeps its gradient.
    """
    is_masked_high = torch.logical_and(inputs.advantages > 0, inputs.moved > delta_high)
    is_masked_low = torch.logical_and(inputs.advantages < 0, inputs.moved < -delta_low)
    return _masked(inputs, is_masked_high, is_masked_low, kl_coef)


def ipo(inputs: RlInputs, *, delta: float, kl_coef: float) -> RlOutputs:
    """As `dppo`, with a mask that does not ask for the sign of the advantage."""
    return _masked(inputs, inputs.moved > delta, inputs.moved < -delta, kl_coef)


def ppo_clip(inputs: RlInputs, *, epsilon: float) -> RlOutputs:
    """`grpo_clip_higher` with equal limits."""
    return grpo_clip_higher(inputs, epsilon_low=epsilon, epsilon_high=epsilon)


def grpo_clip_higher(inputs: RlInputs, *, epsilon_low: float, epsilon_high: float) -> RlOutputs:
    """max(-advantage x ratio, -advantage x clip(ratio))."""
    return _clipped_surrogate(inputs.ratio, inputs.advantages, epsilon_low, epsilon_high)


def gspo(inputs: RlInputs, *, epsilon_low: float, epsilon_high: float) -> RlOutputs:
    """As `grpo_clip_higher`, on one ratio per sample: the geometric mean of the ratios of its tokens.

    Its gradient is spread over the tokens of the sample (each has the sample's ratio as value and the gradient of its
    own log probability), so that advantages and weights by token keep their meaning.
    """
    sample_ratio = bounded_exp(inputs.segment_mean(inputs.log_ratio.detach()))
    ratio = sample_ratio * (inputs.logprobs - inputs.logprobs.detach()).exp()
    return _clipped_surrogate(ratio, inputs.advantages, epsilon_low, epsilon_high)


def cispo(inputs: RlInputs, *, epsilon_low: float, epsilon_high: float) -> RlOutputs:
    """-advantage x clip(ratio, without gradient) x log probability. The mask says where the weight was held.

    The weight of a token is limited, never its gradient: even a token that moved far goes on learning.
    """
    ratio, low, high = inputs.ratio.detach(), 1 - epsilon_low, 1 + epsilon_high
    return RlOutputs(-inputs.advantages * ratio.clamp(low, high) * inputs.logprobs, ratio > high, ratio < low)


def reinforce(inputs: RlInputs) -> RlOutputs:
    """-advantage x log probability; nothing is masked. Right on policy only: it does not correct for a sample's age."""
    nothing = torch.zeros_like(inputs.members)
    return RlOutputs(-inputs.advantages * inputs.logprobs, nothing, nothing)


def _masked(inputs: RlInputs, is_masked_high: Tensor, is_masked_low: Tensor, kl_coef: float) -> RlOutputs:
    keep = ~torch.logical_or(is_masked_high, is_masked_low)
    policy = -inputs.advantages * inputs.ratio * keep
    return RlOutputs(policy + kl_coef * inputs.log_ratio.square(), is_masked_high, is_masked_low)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float) -> RlOutputs:
    """The larger of the two losses. Where the limit wins, the token has no gradient: that is the mask."""
    is_masked_high = torch.logical_and(advantages > 0, ratio.detach() > 1 + epsilon_high)
    is_masked_low = torch.logical_and(advantages < 0, ratio.detach() < 1 - epsilon_low)
    held = torch.where(is_masked_high, 1 + epsilon_high, torch.where(is_masked_low, 1 - epsilon_low, ratio))
    return RlOutputs(-advantages * held, is_masked_high, is_masked_low)
