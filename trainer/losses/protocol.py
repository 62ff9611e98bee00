"""What an `rl` loss gets and gives. L trained tokens; a loss never sees padding, prompts or other ranks."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Beyond this the ratio is held: exp would overflow long before such a token teaches anything."""


@dataclass(frozen=True)
class RlInputs:
    """One entry per trained token, in row order."""

    logprobs: Tensor
    """float32[L]: under the policy being trained, with gradient."""
    behaviour_logprobs: Tensor
    """float32[L]: under the policy that sampled the token."""
    advantages: Tensor
    """float32[L]."""
    segments: Tensor
    """int64[L]: tokens of one sample share the number."""
    num_segments: int

    @property
    def log_ratio(self) -> Tensor:
        """log(policy / behaviour policy), with gradient."""
        return self.logprobs - self.behaviour_logprobs

    @property
    def ratio(self) -> Tensor:
        """The importance ratio, with gradient."""
        return self.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True)
class RlOutputs:
    """Losses, and the mask the loss really used, so that diagnostics cannot drift from it."""

    losses: Tensor
    """float32[L]: one per token, not weighted, not normalised."""
    is_masked_high: Tensor
    """bool[L]: the policy gradient of the token was dropped because it rose too far."""
    is_masked_low: Tensor
    """bool[L]: dropped because it fell too far."""

    @property
    def is_masked(self) -> Tensor:
        """bool[L]: dropped."""
        return torch.logical_or(self.is_masked_high, self.is_masked_low)


class RlLoss(Protocol):
    """A pure function of the tokens. Weights and the global denominator are applied by the caller."""

    def __call__(self, inputs: RlInputs) -> RlOutputs:
        """Loss of each token."""
