"""`Denominators`: how many tokens of the whole mini-batch, on all ranks, belong to each loss component.

Counted on the tokens really trained (after cutting), summed over ranks once per optimizer step. Since every rank
divides by the same numbers and gradients are summed, the gradient is that of the mean over the global mini-batch,
however it is split.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.micro_batch import MicroBatch


@dataclass(frozen=True)
class Denominators:
    """Global counts of member tokens."""

    rl: float
    ce: float
    ref_kl: float

    @property
    def total(self) -> float:
        """0 if nothing at all would be trained."""
        return self.rl + self.ce + self.ref_kl


def count_members(micro_batches: Sequence[MicroBatch]) -> Tensor:
    """float64[3] on the host: members of `rl`, `ce` and `ref_kl` on this rank."""
    counts = torch.zeros(3, dtype=torch.float64)
    for micro_batch in micro_batches:
        tokens = micro_batch.loss_tokens
        for place, weights in enumerate((tokens.rl_weights, tokens.ce_weights, tokens.ref_kl_weights)):
            if weights is not None:
                counts[place] += torch.count_nonzero(weights)
    return counts
