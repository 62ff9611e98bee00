"""Tiny random vision-language models, and image samples for them.

A sample is drawn as text: `.` is a prompt token, `x` a trained one, `s`, `w` and `b` a small, a wide and a big image.
The reference is the model's own forward of one sample alone: eager attention, float64.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.trainer.scenarios import make_sample
from trainer.images.spec import ImageSpec
from transport.wire.sample import EncodedTensor, TrainingSample

VOCAB_SIZE, IMAGE_TOKEN = 64, 60
SPEC = ImageSpec(image_token_id=IMAGE_TOKEN, merge_size=2, patch_numbers=48)
GRIDS = {"s": (1, 2, 2), "w": (1, 2, 6), "b": (1, 4, 4)}
"""1, 3 and 4 tokens."""

TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 61,
    "vision_start_token_id": 62,
    "vision_end_token_id": 63,
    "tie_word_embeddings": True,
}
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "out_hidden_size": 32,
    "initializer_range": 0.15,
}


def rope(*sections: int, **more: object) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}


def make_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "qwen2_5_vl":
        vision = VISION | {"window_size": 16, "fullatt_block_indexes": [1]}
        text = TEXT | {"rope_parameters": rope(4, 2, 2)}
        return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **TOKENS))
    vision = VISION | {"num_position_embeddings": 64}
    if family == "qwen3_vl":
        text = TEXT | {"head_dim": 16, "rope_parameters": rope(4, 2, 2, mrope_interleaved=True)}
        vision |= {"deepstack_visual_indexes": [0]}
        return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **TOKENS))
    assert family == "qwen3_5", family
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=qwen3_5_text(), vision_config=vision, **TOKENS))


def qwen3_5_text() -> dict[str, object]:
    return TEXT | {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "rope_parameters": rope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5),
    }


def save_tiny_text(path: Path) -> None:
    """A Qwen3.5 without eyes."""
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**qwen3_5_text())).save_pretrained(path)


def save_tiny_vlm(path: Path, family: str) -> Path:
    make_model(family).save_pretrained(path)
    return path


def draw(drawing: str, index: int = 0, seed: int = 0, **changes: object) -> TrainingSample:
    """The sample of a drawing."""
    rng = np.random.default_rng((seed, index))
    grids = [GRIDS[kind] for kind in drawing if kind in GRIDS]
    tokens = {kind: rows * columns // 4 for kind, (_, rows, columns) in GRIDS.items()}
    kinds = np.array([kind for kind in drawing for _ in range(tokens.get(kind, 1))])
    is_image, is_trained = np.isin(kinds, list(GRIDS)), kinds == "x"
    token_ids = np.where(is_image, IMAGE_TOKEN, rng.integers(0, IMAGE_TOKEN, len(kinds)))
    logprobs = np.where(is_trained, rng.normal(-3.0, 1.0, len(kinds)).clip(max=-0.05), 0.0)
    fields: dict[str, object] = {
        "token_ids": EncodedTensor.of(token_ids.astype(np.int32)),
        "loss_mask": EncodedTensor.of(is_trained),
        "logprobs": EncodedTensor.of(logprobs.astype(np.float32)),
        "mm_token_type_ids": EncodedTensor.of(is_image.astype(np.uint8)),
    }
    if grids:
        num_patches = sum(rows * columns for _, rows, columns in grids)
        pixels = rng.normal(size=(num_patches, SPEC.patch_numbers)).astype(np.float32)
        fields["mm_kwargs"] = {
            "pixel_values": EncodedTensor.of(pixels),
            "image_grid_thw": EncodedTensor.of(np.array(grids, dtype=np.int64)),
        }
    return make_sample(index, len(kinds), rng, **{**fields, **changes})


def draw_all(*drawings: str, seed: int = 0) -> list[TrainingSample]:
    return [draw(drawing, index, seed) for index, drawing in enumerate(drawings)]


MIXED = (".....xxxx", "..b..xxx", ".s.w..xx..xx", "...xx", "s.xxb", "w..xxxx", "..bs.xxx", "....x.xx", ".w.s.b.xx")
"""Text, one image, many images; images that touch inside a sample and between two (`s.xxb` and `w..xxxx`)."""
SEQ_LEN = 24


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
