"""A prompt with a picture, run by the model itself and by the engine: they must agree before anything is served."""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.generation import Int32s
from inference.images import Images
from inference.torch_engine.slot_model import SlotModel
from inference.torch_engine.vision import Vision


def picture_probe(model: PreTrainedModel) -> tuple[Int32s, Images]:
    """Some text, a picture of two tokens side by side, some more text: rows, columns and offset all matter."""
    limits = Vision(model).limits
    merge = limits.merge_size
    patches = np.linspace(-1, 1, 2 * merge**2 * limits.num_patch_values, dtype=np.float32)
    image = limits.image_token_id
    text = [token for token in range(8) if token not in limits.media_token_ids]
    tokens = np.array([*text[:2], image, image, *text[2:4]], np.int32)
    types = (tokens == image).astype(np.uint8)
    pixels = patches.reshape(-1, limits.num_patch_values)
    return tokens, Images(pixels, np.array([[1, merge, 2 * merge]]), types, merge, b"probe")


def own_logits(model: PreTrainedModel, tokens: Int32s, images: Images) -> Tensor:
    """Logits `[1, V]` of the next token, positions and all by the model's own forward."""
    output = model(
        input_ids=torch.from_numpy(tokens[None].astype(np.int64)).to(model.device),
        mm_token_type_ids=torch.from_numpy(images.token_types[None].astype(np.int64)).to(model.device),
        pixel_values=torch.from_numpy(images.pixel_values).to(model.device),
        image_grid_thw=torch.from_numpy(images.grids).to(model.device),
        use_cache=False,
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def slot_logits(slots: SlotModel, tokens: Int32s, images: Images) -> Tensor:
    """The same, by prefill and one decode step in slot 0."""
    slots.prefill({0: tokens[:-1]}, {0: images})
    return slots.decode(tokens[-1:], np.array([len(tokens) - 1]), np.array([images.rotary_offset]))
