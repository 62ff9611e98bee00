"""Log probabilities of a whole sequence in one forward, beside the running sequences: it reads and writes no cache."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from inference.generation import Floats, Int32s


class WholeSequence:
    """Implements `Slots`: every position attends to itself and to those before it, and nothing is kept."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `Slots`."""
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)


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
