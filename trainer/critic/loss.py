"""The value loss: half the squared distance to the return, with a limit on how far a value may move within a batch."""

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLosses(NamedTuple):
    """One entry per value."""

    losses: Tensor
    """float32[L]: not weighted, not normalised."""
    is_clipped: Tensor
    """bool[L]: the value moved beyond the limit towards its return, and has no gradient."""


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueLosses:
    """`max((V - R)^2, (V_old + clip(V - V_old) - R)^2) / 2`."""
    distances = (values - returns).square()
    if clip is None:
        return ValueLosses(0.5 * distances, torch.zeros_like(values, dtype=torch.bool))
    held = old_values + (values - old_values).clamp(-clip, clip)
    held_distances = (held - returns).square()
    return ValueLosses(0.5 * torch.maximum(distances, held_distances), (held_distances > distances).detach())
