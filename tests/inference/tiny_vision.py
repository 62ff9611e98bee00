"""Tiny random Qwen-VL models, images for them, and what the models themselves say."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from inference.api.images import Images
from tests.support.models import EOS, PAD, VOCAB_SIZE, make_tokenizer
from transport.wire.generation import GenerateRequest
from transport.wire.sample import EncodedTensor

VISION_START, VISION_END, IMAGE, VIDEO, TWIN = range(VOCAB_SIZE, VOCAB_SIZE + 5)
"""`TWIN` has the embedding of `IMAGE`: in its place it tells the model that this image token has no image."""
VISION_VOCAB_SIZE = VOCAB_SIZE + 5
PATCH_VALUES = 3 * 4 * 4
FAMILIES = ("qwen3_vl", "qwen2_5_vl")
_TEXT: dict[str, Any] = {
    "vocab_size": VISION_VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # vLLM's CPU attention has no heads of 16
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [8, 4, 4]},
}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "out_hidden_size": 64,
    "initializer_range": 0.3,
}
_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": True,
}


def make_vision_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model of one of `FAMILIES` that looks at its images."""
    torch.manual_seed(seed)
    model: PreTrainedModel
    if family == "qwen3_vl":
        vision = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        # Transformers interleaves the sections of every Qwen3-VL; vLLM goes by what the config says.
        text = {**_TEXT, "rope_parameters": {**_TEXT["rope_parameters"], "mrope_interleaved": True}}
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **_IDS))
    else:
        vision = {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]}
        text = {name: value for name, value in _TEXT.items() if name != "head_dim"}
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_IDS))
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[TWIN] = embeddings[IMAGE]
    return model.eval()


def save_vision_model(folder: Path, model: PreTrainedModel) -> Path:
    """A Hugging Face folder with all that vLLM asks of one. Nothing ends a sequence but its length."""
    model.config.eos_token_id = model.config.text_config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<twin>"]
    tokenizer.add_tokens(names, special_tokens=True)
    assert tokenizer.convert_tokens_to_ids(names) == [VISION_START, VISION_END, IMAGE, VIDEO, TWIN]
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
    Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=1, merge_size=2, size=size).save_pretrained(folder)
    return folder


def prompt_with(rng: np.random.Generator, *sizes: tuple[int, int]) -> tuple[list[int], Images]:
    """Text around images of `sizes` (rows and columns of merged patches), with random pixels."""
    tokens = rng.integers(3, VOCAB_SIZE, size=4).tolist()
    for rows, columns in sizes:
        text = rng.integers(3, VOCAB_SIZE, size=rng.integers(0, 3)).tolist()
        tokens += [VISION_START, *[IMAGE] * (rows * columns), VISION_END, *text]
    grids = np.array([[1, 2 * rows, 2 * columns] for rows, columns in sizes], np.int64)
    pixels = rng.normal(size=(grids.prod(axis=1).sum(), PATCH_VALUES)).astype(np.float32)
    types = (np.array(tokens) == IMAGE).astype(np.uint8)
    return tokens, Images(pixels, grids, types, 2, pixels.tobytes())


def request_with(tokens: list[int], images: Images | None, **fields: object) -> GenerateRequest:
    """The request of the wire."""
    fields_of_images = (
        {}
        if images is None
        else {
            "mm_kwargs": {
                "pixel_values": EncodedTensor.of(images.pixel_values),
                "image_grid_thw": EncodedTensor.of(images.grids),
            },
            "mm_token_type_ids": EncodedTensor.of(images.token_types),
        }
    )
    ids = EncodedTensor.of(np.array(tokens, np.int32))
    defaults = {"request_id": "r", "token_ids": ids, "max_tokens": 8, "seed": 3}
    return GenerateRequest(**{**defaults, **fields_of_images, **fields})  # type: ignore[arg-type]


@torch.inference_mode()
def own_logprobs(
    model: PreTrainedModel, prompt: list[int], images: Images | None, sampled: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log probabilities of `sampled`, by one forward of the model as Hugging Face would run it."""
    ids = torch.tensor([[*prompt, *(TWIN if token == IMAGE else token for token in sampled)]])
    fields_of_images = {}
    if images is not None:
        types = np.concatenate([images.token_types, np.zeros(len(sampled), np.uint8)])
        fields_of_images = {
            "pixel_values": torch.tensor(images.pixel_values),
            "image_grid_thw": torch.tensor(images.grids),
            "mm_token_type_ids": torch.tensor(types[None].astype(np.int64)),
        }
    logits = model(ids, use_cache=False, **fields_of_images).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]
