"""Attention over the slot cache, registered with transformers under our own name.

The model's forward hands the `slots` argument through to the attention function untouched: a `Prefill` computes many
new positions of some slots, a `Decode` one new position of every running slot.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface


class SlotCache:
    """Per layer: `keys[S, G, L, D]` and `values[S, G, L, D]` for S slots, G key/value heads, L positions.

    Slots are kept dense (running sequences are slots `0..n-1`), so a decode step reads a view `[:n, :, :length]` and
    never gathers. A layer's tensors are made at its first write, with the shapes the model really uses.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        self.max_length = max_length
        self._num_slots = num_slots
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, like_key: Tensor, like_value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer; made on first use, in the dtype and on the device of the given tensors."""
        if index not in self._layers:
            self._layers[index] = (self._allocate(like_key), self._allocate(like_value))
        return self._layers[index]

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Slots `targets` become copies of `sources`, for the first `length` positions. The two sets are disjoint."""
        for keys, values in self._layers.values():
            keys[targets, :, :length] = keys[sources, :, :length]
            values[targets, :, :length] = values[sources, :, :length]

    def _allocate(self, like: Tensor) -> Tensor:
        _, heads, _, size = like.shape
        return torch.zeros(self._num_slots, heads, self.max_length, size, dtype=like.dtype, device=like.device)


ATTENTION_NAME = "tandem_slots"


class AttentionBatch(Protocol):
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
        """Padding leaves garbage in the cache beyond the slot's length, which nothing reads."""
        keys, values = self._cache.layer(layer, key, value)
        keys[self._slots, :, : key.shape[2]] = key
        values[self._slots, :, : value.shape[2]] = value
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)


class Decode:
    """Position `positions[i]` of slot `i`, for all running slots; `length` is the highest position plus one."""

    def __init__(self, cache: SlotCache, positions: Tensor, length: int) -> None:
        self.max_length = cache.max_length
        self._cache = cache
        self._positions = positions
        self._length = length
        self._by_heads: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """For one query position two batched matrix products beat the fused kernels on a CPU.

        Every pair of slot and key/value head is one matrix of the batch; query heads that share it are its rows.
        """
        keys, values = self._cache.layer(layer, key, value)
        batch, num_heads, _, size = query.shape
        groups = key.shape[1]
        places, mask = self._for_heads(groups, query.dtype)
        keys.view(-1, size).index_copy_(0, places, key.reshape(-1, size))
        values.view(-1, value.shape[3]).index_copy_(0, places, value.reshape(-1, value.shape[3]))
        seen_keys = keys.flatten(0, 1)[: batch * groups, : self._length]
        seen_values = values.flatten(0, 1)[: batch * groups, : self._length]
        rows = query.reshape(batch * groups, num_heads // groups, size)
        scores = torch.baddbmm(mask, rows, seen_keys.transpose(1, 2), alpha=scaling)
        probs = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        return torch.bmm(probs, seen_values).view(batch, 1, num_heads, -1)

    def _for_heads(self, groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Where in the flattened cache this step writes, and the additive mask `[B * G, 1, L]`. Once per step."""
        if groups not in self._by_heads:
            device = self._positions.device
            positions = self._positions.repeat_interleave(groups)
            places = torch.arange(len(positions), device=device) * self.max_length + positions
            unseen = torch.arange(self._length, device=device) > positions[:, None]
            mask = torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, -torch.inf)
            self._by_heads[groups] = (places, mask[:, None])
        return self._by_heads[groups]


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    slots: AttentionBatch,
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


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers. No mask function is registered, so none is ever built."""
    AttentionInterface.register(ATTENTION_NAME, slot_attention)


class WholeSequence:
    """Implements `AttentionBatch`: every position attends to itself and to those before it, and nothing is kept."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)
