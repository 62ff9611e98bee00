"""`SlotModel`: a Hugging Face causal LM that reads and writes a `SlotCache`; its forward passes and their plan."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.api.arrays import Floats, Int32s, Int64s
from inference.api.images import Images
from inference.torch_engine.attention import Decode, Prefill, SlotCache, WholeSequence
from inference.torch_engine.vision import Vision
from inference.vision_models import has_vision

NO_DIGESTS: Mapping[int, bytes] = MappingProxyType({})
NO_IMAGES: Mapping[int, Images] = MappingProxyType({})
MAX_PREFILL_TOKENS = 8192
"""Padded tokens of one prefill forward: bounds its memory, and how long running sequences wait for it."""


class PrefillPlan(NamedTuple):
    """`batches` of slots to compute, then `copies`: slots whose tokens equal those of a computed slot."""

    batches: list[list[int]]
    copies: dict[int, list[int]]
    """Computed slot to the slots that copy it. The rollouts of one group share their prompt, so this is the rule."""


def plan_prefill(
    tokens: Mapping[int, Int32s], max_tokens: int, images: Mapping[int, bytes] = NO_DIGESTS
) -> PrefillPlan:
    """Plan for `slot -> tokens to compute`. A batch is padded to its longest row; rows of like length share one, and
    none has more than `max_tokens` padded tokens unless a single row does. Slots without tokens are left out.
    `images` are digests: the same tokens with other images are not the same."""
    first_with: dict[tuple[bytes, bytes], int] = {}
    copies: dict[int, list[int]] = {}
    for slot, row in tokens.items():
        first = first_with.setdefault((images.get(slot, b""), row.tobytes()), slot)
        if first != slot and len(row):
            copies.setdefault(first, []).append(slot)
    unique = [slot for slot in first_with.values() if len(tokens[slot])]
    unique.sort(key=lambda slot: len(tokens[slot]))
    return PrefillPlan(list(_batches(unique, [len(tokens[slot]) for slot in unique], max_tokens)), copies)


def _batches(slots: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Iterable[list[int]]:
    """Cut rows sorted by length so that `rows x longest row <= max_tokens`."""
    batch: list[int] = []
    for slot, length in zip(slots, lengths, strict=True):
        if batch and (len(batch) + 1) * length > max_tokens:
            yield batch
            batch = []
        batch.append(slot)
    if batch:
        yield batch


def pad_right(rows: Sequence[Int32s]) -> Int32s:
    """Rows as one rectangle, padded with token 0."""
    padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


class SlotModel:
    """Forward passes over slots. The model's attention must be `attention.ATTENTION_NAME` (see `loading.py`)."""

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        self.hf = model
        self.device: torch.device = model.device
        self.cache = SlotCache(num_slots, max_length)
        self.vision = Vision(model) if has_vision(model) else None

    def prefill(self, tokens: dict[int, Int32s], images: Mapping[int, Images] = NO_IMAGES) -> None:
        """Compute keys and values of `slot -> tokens`, from position 0, and the images in them. No logits: `decode`
        feeds the token after."""
        plan = plan_prefill(tokens, MAX_PREFILL_TOKENS, {slot: seen.digest for slot, seen in images.items()})
        for batch in plan.batches:
            rows = pad_right([tokens[slot] for slot in batch])
            self._prefill_batch(batch, rows, [images.get(slot) for slot in batch])
        for source, targets in plan.copies.items():
            self.cache.copy(self._indices([source]), self._indices(targets), len(tokens[source]))

    def decode(self, tokens: Int32s, positions: Int64s, offsets: Int64s | None = None) -> Tensor:
        """Feed `tokens[i]` at `positions[i]` of slot `i`; returns the logits `[B, V]` of the next tokens.

        Rotary positions are `positions + offsets`: an image moves them on by less than it has tokens.
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


def sequence_logprobs(model: PreTrainedModel, token_ids: Int32s, temperature: float, max_length: int) -> Floats:
    """float32[T]: log probability of each token given those before it, at `temperature`; 0 at position 0.

    Holds the logits of one sequence, `[T, V]`, at a time: the engine's `max_model_len` bounds them.
    """
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    if len(token_ids) == 1:
        return logprobs
    ids = torch.from_numpy(token_ids.astype(np.int64)).to(model.device)
    positions = torch.arange(len(ids) - 1, device=model.device)
    output = model(
        input_ids=ids[None, :-1], position_ids=positions[None], use_cache=False, slots=WholeSequence(max_length)
    )
    tempered = output.logits[0].float() / temperature
    scored = torch.log_softmax(tempered, dim=-1).gather(1, ids[1:, None])[:, 0]
    logprobs[1:] = scored.cpu().numpy()
    return logprobs
