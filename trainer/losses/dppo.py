"""`dppo`: policy gradient with an importance ratio, masked by how far the probability itself moved.

A ratio of 2 is nothing at p = 1e-4 and a revolution at p = 0.4, so the trust region is on p, not on the ratio. Only
a token that the advantage would push further out is masked; one that it pulls back keeps its gradient.
"""

from dataclasses import dataclass

import torch

from trainer.losses.protocol import RlInputs, RlOutputs


@dataclass(frozen=True)
class DppoLoss:
    """-advantage x ratio where not masked, plus kl_coef x (log ratio)^2 everywhere."""

    delta_low: float
    delta_high: float
    kl_coef: float

    def __call__(self, inputs: RlInputs) -> RlOutputs:
        """Loss of each token."""
        moved = (inputs.logprobs.exp() - inputs.behaviour_logprobs.exp()).detach()
        is_masked_high = torch.logical_and(inputs.advantages > 0, moved > self.delta_high)
        is_masked_low = torch.logical_and(inputs.advantages < 0, moved < -self.delta_low)
        keep = ~torch.logical_or(is_masked_high, is_masked_low)
        policy = -inputs.advantages * inputs.ratio * keep
        return RlOutputs(policy + self.kl_coef * inputs.log_ratio.square(), is_masked_high, is_masked_low)
