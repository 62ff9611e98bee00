"""Made-up image samples that hold a model to what training assumes of it, at start-up."""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from trainer.errors import ModelUnusable
from trainer.images.blocks import block_starts, rope_positions
from trainer.images.family import ImageModel
from trainer.images.spec import GRIDS, IMAGE_TYPE, PIXELS, ImageSpec
from transport.wire.tensor import Array, EncodedTensor


def image_fields(spec: ImageSpec, layout: str, rng: np.random.Generator) -> tuple[Array, dict[str, Any]]:
    """(image mask, fields of a sample): a `.` of `layout` is a token of text, an `s` or `w` a square or wide image."""
    sides = {"s": (spec.merge_size, spec.merge_size), "w": (spec.merge_size, 2 * spec.merge_size)}
    grids = np.array([(1, *sides[kind]) for kind in layout if kind in sides], dtype=np.int64).reshape(-1, 3)
    sizes = iter(spec.tokens_per_image(grids).tolist())
    types = np.concatenate([[IMAGE_TYPE] * next(sizes) if kind in sides else [0] for kind in layout]).astype(np.uint8)
    pixels = rng.normal(size=(int(grids.prod(axis=1).sum()), spec.patch_numbers)).astype(np.float32)
    tensors = {PIXELS: EncodedTensor.of(pixels), GRIDS: EncodedTensor.of(grids)}
    return types == IMAGE_TYPE, {"mm_kwargs": tensors, "mm_token_type_ids": EncodedTensor.of(types)}


def check_positions(base_model: PreTrainedModel, images: ImageModel, device: torch.device) -> None:
    """Raise `ModelUnusable` unless the positions we give to tokens are the model's own, where it has an opinion."""
    rng = np.random.default_rng(0)
    mask, fields = image_fields(images.spec, "..w.s...", rng)
    token_ids = np.where(mask, images.spec.image_token_id, 0)
    grids = fields["mm_kwargs"][GRIDS].numpy()
    ours = rope_positions(len(mask), block_starts(np.flatnonzero(mask), grids, images.spec), grids, images.spec)
    theirs, _ = base_model.get_rope_index(
        input_ids=torch.from_numpy(token_ids)[None].to(device),
        mm_token_type_ids=torch.from_numpy(mask.astype(np.int32))[None].to(device),
        image_grid_thw=torch.from_numpy(grids.copy()).to(device),
    )
    if not np.array_equal(theirs[:, 0].cpu().numpy(), ours):
        raise ModelUnusable(
            f"{images.family.model_type} gives its tokens other positions than this trainer does: its version in "
            "transformers is not one that we know"
        )
