"""`ppo_clip`, `grpo_clip_higher` and `gspo`: the clipped surrogate, on the ratio of a token or of a whole sample."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.losses.protocol import RlInputs, RlOutputs, bounded_exp


@dataclass(frozen=True)
class ClipLoss:
    """max(-advantage x ratio, -advantage x clip(ratio)): `ppo_clip` if both limits are equal."""

    epsilon_low: float
    epsilon_high: float

    def __call__(self, inputs: RlInputs) -> RlOutputs:
        """Loss of each token."""
        return clipped_surrogate(inputs.ratio, inputs.advantages, self.epsilon_low, self.epsilon_high)


@dataclass(frozen=True)
class GspoLoss:
    """The same on one ratio per sample: the geometric mean of the ratios of its tokens.

    Its gradient is spread over the tokens of the sample (each has the sample's ratio as value and the gradient of its
    own log probability), so that advantages and weights by token keep their meaning.
    """

    epsilon_low: float
    epsilon_high: float

    def __call__(self, inputs: RlInputs) -> RlOutputs:
        """Loss of each token."""
        sample_ratio = bounded_exp(inputs.segment_mean(inputs.log_ratio.detach()))
        ratio = sample_ratio * (inputs.logprobs - inputs.logprobs.detach()).exp()
        return clipped_surrogate(ratio, inputs.advantages, self.epsilon_low, self.epsilon_high)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float) -> RlOutputs:
    """The larger of the two losses. Where the limit wins, the token has no gradient: that is the mask."""
    is_masked_high = torch.logical_and(advantages > 0, ratio.detach() > 1 + epsilon_high)
    is_masked_low = torch.logical_and(advantages < 0, ratio.detach() < 1 - epsilon_low)
    held = torch.where(is_masked_high, 1 + epsilon_high, torch.where(is_masked_low, 1 - epsilon_low, ratio))
    return RlOutputs(-advantages * held, is_masked_high, is_masked_low)
