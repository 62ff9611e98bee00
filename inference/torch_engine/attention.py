"""Attention over the slot cache, registered with transformers under our own name.

The model's forward hands the `slots` argument through to the attention function untouched: a `Prefill` computes many
new positions of some slots, a `Decode` one new position of every running slot.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from inference.torch_engine.kv_cache import SlotCache

ATTENTION_NAME = "tandem_slots"


class Slots(Protocol):
    """What the attention function needs to know about the batch."""

    max_length: int
    """No slot is ever longer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store `key` and `value[B, G, T, D]`, attend with `query[B, H, T, D]`; returns `[B, T, H, D]`."""
        ...


class Prefill:
    """Positions `0..T-1` of `slots`, right-padded: causal order alone keeps padding out of every real position."""

    def __init__(self, cache: SlotCache, slots: Tensor) -> None:
        self.max_length = cache.max_length
        self._cache = cache
        self._slots = slots

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `Slots`. Padding positions leave garbage in the cache beyond the slot's length, which nothing reads."""
        keys, values = self._cache.layer(layer, key, value)
        keys[self._slots, :, : key.shape[2]] = key
        values[self._slots, :, : value.shape[2]] = value
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)


class Decode:
    """Position `positions[i]` of slot `i`, for all running slots."""

    def __init__(self, cache: SlotCache, positions: Tensor, length: int) -> None:
        self.max_length = cache.max_length
        self._cache = cache
        self._positions = positions
        self._rows = torch.arange(len(positions), device=positions.device)
        self._length = length
        unseen = torch.arange(length, device=positions.device) > positions[:, None]
        self._mask = torch.zeros(unseen.shape, device=positions.device).masked_fill_(unseen, -torch.inf)[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `Slots`. For one query position two batched matrix products beat the fused kernels on a CPU."""
        keys, values = self._cache.layer(layer, key, value)
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        batch, num_heads, _, size = query.shape
        num_kv_heads = keys.shape[1]
        grouped = query.reshape(batch, num_kv_heads, num_heads // num_kv_heads, size) * scaling
        scores = torch.matmul(grouped, keys[:batch, :, : self._length].transpose(2, 3))
        probs = torch.softmax(scores + self._mask, dim=-1, dtype=torch.float32).to(value.dtype)
        return torch.matmul(probs, values[:batch, :, : self._length]).reshape(batch, 1, num_heads, -1)


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    slots: Slots,
    **options: object,
) -> tuple[Tensor, None]:
    """The attention function that the model calls in every layer. Raises `ValueError` for attention of another kind."""
    _check_options(options, slots.max_length)
    layer: int = module.layer_idx  # type: ignore[assignment]
    return slots.attend(layer, query, key, value, scaling), None


def _check_options(options: dict[str, object], max_length: int) -> None:
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(f"its attention needs {name!r}")
    window = options.get("sliding_window")
    if isinstance(window, int) and window < max_length:
        raise ValueError(
            f"its attention slides over {window} tokens, which is served only up to that length: "
            f"set --torch.max-model-len {window}"
        )


def register() -> None:
    """Make `ATTENTION_NAME` known to transformers. No mask function is registered, so none is ever built."""
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
