"""`SlotModel`: a Hugging Face causal LM that reads and writes a `SlotCache`."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.generation import Int32s
from inference.torch_engine.attention import Decode, Prefill, Slots
from inference.torch_engine.kv_cache import SlotCache
from inference.torch_engine.llama_forward import LlamaForward, is_llama_like
from inference.torch_engine.prefill_plan import pad_right, plan_prefill

Int64s = npt.NDArray[np.int64]
MAX_PREFILL_TOKENS = 8192
"""Padded tokens of one prefill forward: bounds its memory, and how long running sequences wait for it."""


class SlotModel:
    """Forward passes over slots. The model's attention must be `attention.ATTENTION_NAME` (see `loading.py`)."""

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        self.hf = model
        self.device: torch.device = model.device
        self.cache = SlotCache(num_slots, max_length)
        self._forward = LlamaForward(model, max_length) if is_llama_like(model) else self._hf_forward

    def prefill(self, tokens: dict[int, Int32s]) -> None:
        """Compute keys and values of `slot -> tokens`, from position 0. No logits: `decode` feeds the token after."""
        plan = plan_prefill(tokens, MAX_PREFILL_TOKENS)
        for batch in plan.batches:
            self._prefill_batch(batch, pad_right([tokens[slot] for slot in batch]))
        for source, targets in plan.copies.items():
            self.cache.copy(self._indices([source]), self._indices(targets), len(tokens[source]))

    def decode(self, tokens: Int32s, positions: Int64s) -> Tensor:
        """Feed `tokens[i]` at `positions[i]` of slot `i`; returns the logits `[B, V]` of the next tokens."""
        where = torch.from_numpy(positions).to(self.device)
        slots = Decode(self.cache, where, int(positions.max()) + 1)
        return self._forward(torch.from_numpy(tokens).to(self.device), where, slots)

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Slots `targets` take over what `sources` hold, up to `length` positions."""
        if sources:
            self.cache.copy(self._indices(sources), self._indices(targets), length)

    def _hf_forward(self, tokens: Tensor, positions: Tensor, slots: Slots) -> Tensor:
        output = self.hf(input_ids=tokens[:, None], position_ids=positions[:, None], use_cache=False, slots=slots)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _prefill_batch(self, slots: list[int], tokens: Int32s) -> None:
        num_rows, length = tokens.shape
        self.hf.get_decoder()(
            input_ids=torch.from_numpy(tokens).to(self.device),
            position_ids=torch.arange(length, device=self.device).expand(num_rows, length),
            use_cache=False,
            slots=Prefill(self.cache, self._indices(slots)),
        )

    def _indices(self, slots: list[int]) -> Tensor:
        return torch.tensor(slots, device=self.device)
