"""What a vision-language model says of one sample alone: the model's own forward, eager attention, float64."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from transport.wire.sample import TrainingSample


def load_reference(path: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")


def reference_logprobs(model: PreTrainedModel, sample: TrainingSample) -> Tensor:
    """Of the trained tokens."""
    token_ids = torch.from_numpy(sample.token_ids.numpy().astype(np.int64))[None]
    images: dict[str, Tensor] = {}
    if sample.mm_kwargs:
        images = {name: torch.from_numpy(tensor.numpy().copy()) for name, tensor in sample.mm_kwargs.items()}
        images["position_ids"] = plain_positions(sample)[:, None]
    logits = model(input_ids=token_ids, use_cache=False, **images).logits[0, :-1] / sample.temperature
    logprobs = logits.log_softmax(-1).gather(-1, token_ids[0, 1:, None])[:, 0]
    return logprobs[torch.from_numpy(sample.loss_mask.numpy()[1:].copy())]


def plain_positions(sample: TrainingSample) -> Tensor:
    """int64[3, T], token by token. The model's own function takes two images that touch for one."""
    assert sample.mm_token_type_ids is not None
    is_image = sample.mm_token_type_ids.numpy().tolist()
    grids = iter(sample.mm_kwargs["image_grid_thw"].numpy().tolist())
    positions: list[tuple[int, int, int]] = []
    start = 0
    while len(positions) < len(is_image):
        if not is_image[len(positions)]:
            positions.append((start, start, start))
            start += 1
            continue
        _, height, width = next(grids)
        positions += [
            (start, start + row, start + column) for row in range(height // 2) for column in range(width // 2)
        ]
        start += max(height, width) // 2
    return torch.tensor(positions).T


def reference_gradients(path: Path, samples: Sequence[TrainingSample]) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """(log probabilities by sample, gradients by name) of the mean of `-advantage x log probability` over tokens."""
    model = load_reference(path)
    logprobs = [reference_logprobs(model, sample) for sample in samples]
    num_tokens = sum(len(part) for part in logprobs)
    losses = [-sample.advantages * part.sum() for sample, part in zip(samples, logprobs, strict=True)]
    (torch.stack(losses).sum() / num_tokens).backward()
    return [part.detach() for part in logprobs], {name: weight.grad for name, weight in model.named_parameters()}


def relative_error(gradients: dict[str, Tensor], expected: dict[str, Tensor | None]) -> float:
    """Largest difference, as a share of the largest number. What has no gradient in `expected` must have none, or 0."""
    known = {name: gradient for name, gradient in expected.items() if gradient is not None}
    assert gradients.keys() >= known.keys()
    assert not any(gradients[name].any() for name in gradients.keys() - known.keys())
    differences = [float((gradients[name] - gradient).abs().max()) for name, gradient in known.items()]
    return max(differences) / max(float(gradient.abs().max()) for gradient in known.values())
