"""What an `rl` loss gets and gives. L trained tokens; a loss never sees padding, prompts or other ranks."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Beyond this the ratio is held: exp would overflow long before such a token teaches anything."""


@dataclass(frozen=True)
class RlInputs:
    """One entry per trained token, in row order. Tokens of several samples follow each other."""

    logprobs: Tensor
    """float32[L]: under the policy being trained, with gradient."""
    behaviour_logprobs: Tensor
    """float32[L]: under the policy that sampled the token."""
    advantages: Tensor
    """float32[L]."""
    members: Tensor
    """bool[L]: tokens that belong to the `rl` component. The loss of another one is thrown away, so a loss that looks
    beyond a single token must look at these only."""
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
        return bounded_exp(self.log_ratio)

    @property
    def moved(self) -> Tensor:
        """Change of the token's probability since it was sampled, without gradient."""
        return (self.logprobs.exp() - self.behaviour_logprobs.exp()).detach()

    def segment_mean(self, values: Tensor) -> Tensor:
        """float[L]: for each token the mean of `values` over the member tokens of its sample (0 if it has none)."""
        kept = torch.where(self.members, values, 0.0)
        sums = values.new_zeros(self.num_segments).index_add(0, self.segments, kept)
        counts = values.new_zeros(self.num_segments).index_add(0, self.segments, self.members.to(values.dtype))
        return (sums / counts.clamp(min=1))[self.segments]


@dataclass(frozen=True)
class RlOutputs:
    """Losses, and the mask the loss really used, so that diagnostics cannot drift from it."""

    losses: Tensor
    """float32[L]: one per token, not weighted, not normalised."""
    is_masked_high: Tensor
    """bool[L]: the policy gradient of the token was dropped (`cispo`: its weight held) because it rose too far."""
    is_masked_low: Tensor
    """bool[L]: dropped (or held) because it fell too far."""

    @property
    def is_masked(self) -> Tensor:
        """bool[L]: the policy gradient of the token was dropped (`cispo`: its weight held), for either reason."""
        return torch.logical_or(self.is_masked_high, self.is_masked_low)


class RlLoss(Protocol):
    """A pure function of the tokens. Weights and the global denominators are applied by the caller."""

    def __call__(self, inputs: RlInputs) -> RlOutputs:
        pass


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """The ratio of a log ratio, held where it would overflow."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
