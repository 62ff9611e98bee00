"""`Denominators`: what each loss component is divided by: counts of the whole mini-batch, on all ranks.

Counted on the tokens really trained (after cutting), summed over ranks once per optimizer step. Since every rank
divides by the same numbers and gradients are summed, the gradient is that of the mean over the global mini-batch,
however it is split. A token of unit u counts 1 / (member tokens of u x units that have members): the mean over units
of the mean over the tokens of each (`Weighting`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.micro_batch import MicroBatch

COMPONENTS = ("rl", "ce", "ref_kl")
"""Summands of the loss, in the order of every table of them."""


@dataclass(frozen=True)
class Denominators:
    """Share of the loss that one member token has, by component and unit."""

    shares: Tensor
    """float32[components, units]: 0 for a unit without members."""
    present: frozenset[str]
    """Components that any token, on any rank, belongs to."""

    @classmethod
    def of(cls, members: Tensor, device: torch.device) -> "Denominators":
        """From `count_members` of all ranks added up, on the host."""
        has_members = members.any(dim=1).tolist()
        present = frozenset(name for name, any_token in zip(COMPONENTS, has_members, strict=True) if any_token)
        return cls(unit_shares(members).float().to(device), present)

    def average(self, component: str, losses: Tensor, weights: Tensor, units: Tensor) -> Tensor:
        """This micro batch's summand of the mean of `component`, from its losses, weights and units by token."""
        return (losses * weights * self.shares[COMPONENTS.index(component)][units]).sum()


def unit_shares(members: Tensor) -> Tensor:
    """Share of one member token of each unit in the mean over units, from the members of each: [..., units] both."""
    num_units = torch.count_nonzero(members, dim=-1).unsqueeze(-1)
    return torch.where(members > 0, 1.0 / (members * num_units), 0.0)


def count_members(micro_batches: Sequence[MicroBatch], num_units: int) -> Tensor:
    """float64[components, units] on the host: member tokens on this rank."""
    counts = torch.zeros(len(COMPONENTS), num_units, dtype=torch.float64)
    for micro_batch in micro_batches:
        tokens, units = micro_batch.loss_tokens, micro_batch.token_units
        for place, weights in enumerate((tokens.rl_weights, tokens.ce_weights, tokens.ref_kl_weights)):
            if weights is not None:
                counts[place].index_add_(0, units, (weights != 0).double())
    return counts
