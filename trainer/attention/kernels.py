"""Attention over a packed row, one function per kernel. Causal inside a segment, blind across segments.

All have the signature that transformers calls its attention functions with (q [1, H, T, D]; k, v [1, H_kv, T, D];
returns [1, T, H, D]) and take the boundaries from `segments`, never from position ids or masks: guessing them from
positions leaks between samples without a warning in three ways (cache on, mask given, positions that happen to go on).
"""

import functools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from trainer.attention.context import part_sdpa
from trainer.attention.segments import SegmentInfo
from trainer.errors import ModelUnusable


class AttentionFunction(Protocol):
    """`sliding_window` w: a token sees itself and the w - 1 before it. `extras` no kernel honours are refused."""

    def __call__(
        self,
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
        """(attention output, no weights)."""


def segment_sdpa(
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
    """torch's scaled dot product per segment. Runs everywhere, and on CPU faster than any dense mask."""
    refuse_extras(extras)
    if segments.part is not None:
        out = part_sdpa(query, key, value, segments.seq_lens, segments.part, scaling, sliding_window)
        return out.transpose(1, 2), None
    split = [torch.split(tensor, list(segments.seq_lens), dim=2) for tensor in (query, key, value)]
    parts = [_one_segment(q, k, v, scaling, sliding_window) for q, k, v in zip(*split, strict=True)]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def torch_varlen(
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
    """torch's own variable-length flash attention (GPU, half precision)."""
    from torch.nn.attention.varlen import varlen_attn

    refuse_extras(extras)
    q, k, v = _flat(query, key, value)
    out = varlen_attn(
        q,
        k,
        v,
        segments.cu_seqlens,
        segments.cu_seqlens,
        segments.max_len,
        segments.max_len,
        scale=scaling,
        window_size=_window(sliding_window),
        enable_gqa=True,
    )
    assert isinstance(out, Tensor)
    return out[None], None


def flash_attn(
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
    """The flash-attn package's variable-length kernel (GPU, half precision)."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    refuse_extras(extras)
    q, k, v = _flat(query, key, value)
    out: Tensor = flash_attn_varlen_func(
        q,
        k,
        v,
        segments.cu_seqlens,
        segments.cu_seqlens,
        segments.max_len,
        segments.max_len,
        softmax_scale=scaling,
        causal=True,
        window_size=_window(sliding_window),
    )
    return out[None], None


def flex(
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
    """torch's flex attention, compiled, over blocks that hold a pair of tokens of one segment (GPU)."""
    refuse_extras(extras)
    mask = _block_mask(segments, sliding_window)
    query, key = query.to(value.dtype), key.to(value.dtype)
    if query.device.type == "cpu":  # the compiler has no CPU kernel with a gradient; without it, all scores are held
        out = flex_attention(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    else:
        out = _compiled_flex()(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2), None


def refuse_extras(extras: dict[str, object]) -> None:
    """Raise for what changes the result (soft cap, attention sinks): dropping it silently would train another model."""
    unknown = sorted(name for name in ("softcap", "s_aux") if extras.get(name) is not None)
    if unknown:
        raise ModelUnusable(f"packed attention does not implement {', '.join(unknown)}, which the model needs")


def _one_segment(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    length = query.shape[2]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    band = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=band, scale=scaling, enable_gqa=True)


@functools.lru_cache(maxsize=4)  # by identity of the segments: one entry serves all layers of a micro batch
def _block_mask(segments: SegmentInfo, window: int | None) -> BlockMask:
    ids = segments.segment_ids

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = (query >= key) & (ids[query] == ids[key])
        return allowed if window is None else allowed & (query - key < window)

    return create_block_mask(sees, None, None, len(ids), len(ids), device=str(ids.device))


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    """Compiled once, for rows of any length."""
    return torch.compile(flex_attention, dynamic=True)


def _flat(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[1, H, T, D] to [T, H, D], in the type of `value`: under autocast norms and rotations leave float32 behind."""
    return (
        query[0].transpose(0, 1).to(value.dtype),
        key[0].transpose(0, 1).to(value.dtype),
        value[0].transpose(0, 1),
    )


def _window(sliding_window: int | None) -> tuple[int, int]:
    return (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
