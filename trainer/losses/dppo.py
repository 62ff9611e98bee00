"""`dppo` and `ipo`: policy gradient with an importance ratio, masked by how far the probability itself moved.

A ratio of 2 is nothing at p = 1e-4 and a revolution at p = 0.4, so the trust region is on p, not on the ratio. `dppo`
masks only a token that the advantage would push further out; one that it pulls back keeps its gradient. `ipo` masks
whatever moved too far, either way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.losses.protocol import RlInputs, RlOutputs


@dataclass(frozen=True)
class DppoLoss:
    """-advantage x ratio where not masked, plus kl_coef x (log ratio)^2 everywhere."""

    delta_low: float
    delta_high: float
    kl_coef: float

    def __call__(self, inputs: RlInputs) -> RlOutputs:
        """Loss of each token."""
        is_masked_high = torch.logical_and(inputs.advantages > 0, inputs.moved > self.delta_high)
        is_masked_low = torch.logical_and(inputs.advantages < 0, inputs.moved < -self.delta_low)
        return _masked(inputs, is_masked_high, is_masked_low, self.kl_coef)


@dataclass(frozen=True)
class IpoLoss:
    """As `DppoLoss`, with a mask that does not ask for the sign of the advantage."""

    delta: float
    kl_coef: float

    def __call__(self, inputs: RlInputs) -> RlOutputs:
        """Loss of each token."""
        return _masked(inputs, inputs.moved > self.delta, inputs.moved < -self.delta, self.kl_coef)


def _masked(inputs: RlInputs, is_masked_high: Tensor, is_masked_low: Tensor, kl_coef: float) -> RlOutputs:
    keep = ~torch.logical_or(is_masked_high, is_masked_low)
    policy = -inputs.advantages * inputs.ratio * keep
    return RlOutputs(policy + kl_coef * inputs.log_ratio.square(), is_masked_high, is_masked_low)
