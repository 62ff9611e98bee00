"""`SlotCache`: keys and values of all running sequences, one slot per sequence.

Slots are kept dense (running sequences are slots `0..n-1`), so a decode step reads a view `[:n, :, :length]` and
never gathers. A layer's tensors are made at its first write, with the shapes the model really uses.
"""

import torch
from torch import Tensor


class SlotCache:
    """Per layer: `keys[S, G, L, D]` and `values[S, G, L, D]` for S slots, G key/value heads, L positions."""

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
