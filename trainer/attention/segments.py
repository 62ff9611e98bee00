"""`SegmentInfo`: where the samples of a packed row begin and end. The one thing attention kernels go by."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class RowPart:
    """Tokens `[start, stop)` of a row, which this rank computes; the ranks of `group` have the others."""

    group: dist.ProcessGroup
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Length of every part of the row."""
        return self.stop - self.start


@dataclass(frozen=True)
class SegmentInfo:
    """Made once per micro batch, shared by all layers."""

    seq_lens: tuple[int, ...]
    cu_seqlens: Tensor
    """int32[S + 1]: 0, then the end of each segment."""
    max_len: int
    part: RowPart | None = None
    """What the queries are of; `None`: of the whole row."""

    @classmethod
    def of(cls, seq_lens: tuple[int, ...], device: torch.device, part: RowPart | None = None) -> "SegmentInfo":
        """Segments of these lengths. Each must hold a token."""
        if not seq_lens or min(seq_lens) < 1:
            raise ValueError(f"every segment needs at least one token, got {seq_lens}")
        ends = torch.tensor((0, *seq_lens), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(seq_lens, ends.to(device), max(seq_lens), part)
