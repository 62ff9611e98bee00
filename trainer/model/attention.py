"""Attention over a packed row, one function per kernel. Causal inside a segment, blind across segments.

    torch_varlen  GPU, bfloat16
    segment_sdpa  everything else

The kernel is chosen once at start-up, and never swapped quietly. Kernels take the boundaries from `segments`, never
from position ids or masks: guessing them from positions leaks between samples without a warning in three ways (cache
on, mask given, positions that happen to go on). Only `segment_sdpa` was run by us; `torch_varlen` is written from its
documentation, and the packing check at start-up (`trainer.checks.packing`) stands between it and a wrong gradient.

With context parallelism a rank computes the queries of its own tokens, over keys and values of the whole row.
Contiguous parts make later ranks work more; the result does not depend on that. The gather is autograd's own functional
collective: `torch.distributed.nn.functional.all_gather` returns wrong gradients on gloo when these have permuted
strides, without a warning.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from trainer.errors import AttentionUnavailable, ModelUnusable
from trainer.planning.pack import RowPart, SegmentInfo


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


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel and what it needs."""

    name: str
    function: Kernel
    needs_gpu: bool = False
    needs_half: bool = False
    can_share_rows: bool = False
    """Whether it computes one rank's part of a row (`parallel.cp`)."""

    @property
    def implementation(self) -> str:
        """The name transformers knows it by; ours alone, so that no kernel of theirs is meant."""
        return f"tandem_{self.name}"

    def why_unusable(self, device: torch.device, dtype: torch.dtype, *, shares_rows: bool = False) -> str | None:
        """The reason this kernel cannot run here; `None` if it can."""
        if self.needs_gpu and device.type == "cpu":
            return "it has no CPU kernel"
        if self.needs_half and dtype not in (torch.bfloat16, torch.float16):
            return f"it needs model.dtype = 'bfloat16', not {str(dtype).removeprefix('torch.')}"
        if shares_rows and not self.can_share_rows:
            return "it cannot share a row between ranks (parallel.cp)"
        return None

    def install(self, *, outside_of_graphs: bool = False) -> None:
        """Make it known to transformers, with a mask function that never builds a T x T mask; for layers that are
        compiled as a call that is not compiled with them."""
        function = attention_function(self.function)
        if outside_of_graphs:
            function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        AttentionInterface.register(self.implementation, function)
        AttentionMaskInterface.register(self.implementation, _no_mask)


KERNELS = (
    AttentionKernel("torch_varlen", torch_varlen, needs_gpu=True, needs_half=True),
    AttentionKernel("segment_sdpa", segment_sdpa, can_share_rows=True),
)
"""Best first."""


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, *, shares_rows: bool = False) -> AttentionKernel:
    """The kernel of that name, or for `auto` the first usable one. Raises `AttentionUnavailable` with the reason."""
    reasons = {kernel.name: kernel.why_unusable(device, dtype, shares_rows=shares_rows) for kernel in KERNELS}
    for kernel in KERNELS:
        if name in ("auto", kernel.name) and reasons[kernel.name] is None:
            return kernel
    usable = ", ".join(other for other, reason in reasons.items() if reason is None)
    raise AttentionUnavailable(
        f"model.attention = {name!r} cannot run on {device.type}: {reasons[name]}; usable here: auto, {usable}"
    )


def _no_mask(*args: object, **kwargs: object) -> None:
    """Builds no mask: kernels take the boundaries from `segments`."""
