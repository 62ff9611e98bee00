"""Attention over a packed row, one function per kernel. Causal inside a segment, blind across segments.

Kernels take the boundaries from `segments`, never from position ids or masks: guessing them from positions leaks
between samples without a warning in three ways (cache on, mask given, positions that happen to go on).
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.attention.context import part_sdpa
from trainer.attention.segments import SegmentInfo
from trainer.errors import ModelUnusable


class Kernel(Protocol):
    """q [1, H, T, D]; k, v [1, H_kv, T, D]; `window` w: a token sees itself and the w - 1 before it."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, segments: SegmentInfo, scaling: float | None, window: int | None
    ) -> Tensor:
        """[1, T, H, D]."""


def attention_function(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    """`kernel` as transformers calls it: (attention output, no weights). Raises `ModelUnusable` for what changes the
    result and no kernel honours (soft cap, attention sinks): dropping it silently would train another model."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        segments: SegmentInfo,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **extras: object,
    ) -> tuple[Tensor, None]:
        unknown = [name for name in ("s_aux", "softcap") if extras.get(name) is not None]
        if unknown:
            raise ModelUnusable(f"packed attention does not implement {', '.join(unknown)}, which the model needs")
        return kernel(query, key, value, segments, scaling, sliding_window), None

    return attend


def segment_sdpa(
    q: Tensor, k: Tensor, v: Tensor, segments: SegmentInfo, scaling: float | None, window: int | None
) -> Tensor:
    """torch's scaled dot product per segment. Runs everywhere, and on CPU faster than any dense mask."""
    if segments.part is not None:
        return part_sdpa(q, k, v, segments.seq_lens, segments.part, scaling, window).transpose(1, 2)
    split = [torch.split(tensor, list(segments.seq_lens), dim=2) for tensor in (q, k, v)]
    parts = [_one_segment(query, key, value, scaling, window) for query, key, value in zip(*split, strict=True)]
    return torch.cat(parts, dim=2).transpose(1, 2)


def torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, segments: SegmentInfo, scaling: float | None, window: int | None
) -> Tensor:
    """torch's own variable-length flash attention (GPU, half precision)."""
    from torch.nn.attention.varlen import varlen_attn

    # [T, H, D], in the type of `v`: under autocast norms and rotations leave float32 behind.
    query, key, value = (tensor[0].transpose(0, 1).to(v.dtype) for tensor in (q, k, v))
    ends, longest = segments.cu_seqlens, segments.max_len
    behind = -1 if window is None else window - 1
    out = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scaling, window_size=(behind, 0), enable_gqa=True
    )
    assert isinstance(out, Tensor)
    return out[None]


def _one_segment(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    length = query.shape[2]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    band = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=band, scale=scaling, enable_gqa=True)
