"""What a vision-language model says of one sample alone: the model's own forward, eager attention, float64."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from transport.sample import TrainingSample


def load_reference(path: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")


def reference_logprobs(model: PreTrainedModel, sample: TrainingSample) -> Tensor:
    """Of the trained tokens."""
    token_ids = torch.from_numpy(sample.token_ids.numpy().astype(np.int64))[None]
    images: dict[str, Tensor] = {}
    if sample.mm_kwargs:
        assert sample.mm_token_type_ids is not None
        images = {name: torch.from_numpy(tensor.numpy().copy()) for name, tensor in sample.mm_kwargs.items()}
        images["mm_token_type_ids"] = torch.from_numpy(sample.mm_token_type_ids.numpy().astype(np.int32))[None]
    logits = model(input_ids=token_ids, use_cache=False, **images).logits[0, :-1] / sample.temperature
    logprobs = logits.log_softmax(-1).gather(-1, token_ids[0, 1:, None])[:, 0]
    return logprobs[torch.from_numpy(sample.loss_mask.numpy()[1:].copy())]
