"""Attention of one rank's part of a row: keys and values of the whole row, queries of its own tokens.

Contiguous parts make later ranks work more (a causal query sees everything before it); the result does not depend on
that. The gather is autograd's own functional collective: `torch.distributed.nn.functional.all_gather` returns wrong
gradients on gloo when these have permuted strides, without a warning.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single_autograd

from trainer.attention.segments import RowPart


def part_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: tuple[int, ...],
    part: RowPart,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """[1, H, T_part, D] from q of that shape and k, v [1, H_kv, T_part, D] of every rank."""
    keys: Tensor = all_gather_single_autograd(key.contiguous(), 2, part.group)
    values: Tensor = all_gather_single_autograd(value.contiguous(), 2, part.group)
    outputs = []
    for segment, first, last in overlaps(seq_lens, part.start, part.stop):
        queries = query[:, :, first - part.start : last - part.start]
        seen = slice(segment, last)
        mask = _causal(last - first, last - segment, window, query.device)
        outputs.append(
            F.scaled_dot_product_attention(
                queries, keys[:, :, seen], values[:, :, seen], attn_mask=mask, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(outputs, dim=2)


def overlaps(seq_lens: tuple[int, ...], start: int, stop: int) -> list[tuple[int, int, int]]:
    """(start of the segment, first and end of its tokens in [start, stop)) for each segment that has any there."""
    found, begin = [], 0
    for length in seq_lens:
        first, last = max(begin, start), min(begin + length, stop)
        if first < last:
            found.append((begin, first, last))
        begin += length
    return found


def _causal(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool[num_queries, num_keys]: the last query stands at the last key."""
    offset = num_keys - num_queries
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(offset)
    return mask if window is None else mask.triu(offset + 1 - window)
