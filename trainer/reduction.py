"""Sums and maxima over all ranks. In a plain process, without a process group, a rank is all there is."""

import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(values: Tensor) -> Tensor:
    """`values` summed in place over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def max_over_ranks(values: Tensor) -> Tensor:
    """The elementwise maximum over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values
