"""`SlotModel`: a Hugging Face causal LM that reads and writes a `SlotCache`."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.generation import Int32s
from inference.images import Images
from inference.torch_engine.attention import Decode, Prefill
from inference.torch_engine.kv_cache import SlotCache
from inference.torch_engine.prefill_plan import pad_right, plan_prefill
from inference.torch_engine.vision import Vision, has_vision

Int64s = npt.NDArray[np.int64]
NO_IMAGES: Mapping[int, Images] = MappingProxyType({})
MAX_PREFILL_TOKENS = 8192
"""Padded tokens of one prefill forward: bounds its memory, and how long running sequences wait for it."""


class SlotModel:
    """Forward passes over slots. The model's attention must be `attention.ATTENTION_NAME` (see `loading.py`)."""

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        self.hf = model
        self.device: torch.device = model.device
        self.cache = SlotCache(num_slots, max_length)
        self.vision = Vision(model) if has_vision(model) else None

    def prefill(self, tokens: dict[int, Int32s], images: Mapping[int, Images] = NO_IMAGES) -> None:
        """Compute keys and values of `slot -> tokens`, from position 0, and the pictures in them. No logits: `decode`
        feeds the token after."""
        plan = plan_prefill(tokens, MAX_PREFILL_TOKENS, {slot: seen.digest for slot, seen in images.items()})
        for batch in plan.batches:
            rows = pad_right([tokens[slot] for slot in batch])
            self._prefill_batch(batch, rows, [images.get(slot) for slot in batch])
        for source, targets in plan.copies.items():
            self.cache.copy(self._indices([source]), self._indices(targets), len(tokens[source]))

    def decode(self, tokens: Int32s, positions: Int64s, offsets: Int64s | None = None) -> Tensor:
        """Feed `tokens[i]` at `positions[i]` of slot `i`; returns the logits `[B, V]` of the next tokens.

        Rotary positions are `positions + offsets`: a picture moves them on by less than it has tokens.
        """
        where = torch.from_numpy(positions).to(self.device)
        slots = Decode(self.cache, where, int(positions.max()) + 1)
        angles = where if offsets is None else torch.from_numpy(positions + offsets).to(self.device)
        ids = torch.from_numpy(tokens).to(self.device)[:, None]
        output = self.hf(input_ids=ids, position_ids=angles[:, None], use_cache=False, slots=slots)
        logits: Tensor = output.logits[:, -1]
        return logits

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Slots `targets` take over what `sources` hold, up to `length` positions."""
        if sources:
            self.cache.copy(self._indices(sources), self._indices(targets), length)

    def _prefill_batch(self, slots: list[int], tokens: Int32s, images: Sequence[Images | None]) -> None:
        prefill = Prefill(self.cache, self._indices(slots))
        ids = torch.from_numpy(tokens).to(self.device)
        if self.vision is not None:
            self.vision.forward(ids, images, prefill)
            return
        num_rows, length = tokens.shape
        positions = torch.arange(length, device=self.device).expand(num_rows, length)
        self.hf.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False, slots=prefill)

    def _indices(self, slots: list[int]) -> Tensor:
        return torch.tensor(slots, device=self.device)
