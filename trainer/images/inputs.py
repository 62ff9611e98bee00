"""`ImageInputs`: the images of one micro batch, merged, and where their features go in the row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trainer.images.spec import PIXELS, ImageSpec, block_starts, grids_of, image_tokens_of, rope_positions
from transport.wire.sample import EncodedTensor, TrainingSample

_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ImageInputs:
    """P patches of N images, which are I tokens of a row of T. A dummy image is one of the N but in no count."""

    pixel_values: Tensor
    """[P, numbers per patch]."""
    grids: Tensor
    """int64[N, 3]."""
    token_index: Tensor
    """int64[I]: places in the row that take the features, in order. The only thing the scatter goes by."""
    positions: Tensor
    """int64[3, T]: time, height and width, from 0 in every segment."""
    num_images: int
    num_tokens: int
    num_patches: int

    def to(self, device: torch.device) -> "ImageInputs":
        return replace(
            self,
            pixel_values=self.pixel_values.to(device),
            grids=self.grids.to(device),
            token_index=self.token_index.to(device),
            positions=self.positions.to(device),
        )


def merge_images(samples: Sequence[TrainingSample], spec: ImageSpec, num_after: int) -> ImageInputs:
    """The images of samples that passed `check_image_samples`, end to end, then `num_after` tokens of padding."""
    parts = [_positions(sample, spec) for sample in samples]
    offsets = np.cumsum([0, *(sample.num_tokens for sample in samples)])
    places = [image_tokens_of(sample) + offset for sample, offset in zip(samples, offsets[:-1], strict=True)]
    padding = np.broadcast_to(np.arange(num_after), (3, num_after))
    grids = np.concatenate([grids_of(sample) for sample in samples])
    pixels = _merge_pixels([sample.mm_kwargs[PIXELS] for sample in samples if sample.mm_kwargs])
    token_index = np.concatenate(places)
    return ImageInputs(
        pixel_values=pixels,
        grids=torch.from_numpy(grids),
        token_index=torch.from_numpy(token_index),
        positions=torch.from_numpy(np.concatenate([*parts, padding], axis=1)),
        num_images=len(grids),
        num_tokens=len(token_index),
        num_patches=pixels.shape[0],
    )


def dummy_image(row_positions: Tensor, place: int, spec: ImageSpec) -> ImageInputs:
    """One black image of one token at `place` of a row without images: it makes the vision tower run, and no more."""
    grids = torch.from_numpy(spec.smallest_grid)
    return ImageInputs(
        pixel_values=torch.zeros(spec.merge_size**2, spec.patch_numbers),
        grids=grids,
        token_index=torch.tensor([place]),
        positions=row_positions.expand(3, -1),
        num_images=0,
        num_tokens=0,
        num_patches=0,
    )


def _positions(sample: TrainingSample, spec: ImageSpec) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    grids = grids_of(sample)
    return rope_positions(sample.num_tokens, block_starts(image_tokens_of(sample), grids, spec), grids, spec)


def _merge_pixels(parts: Sequence[EncodedTensor]) -> Tensor:
    """One copy into one tensor: of the common type, or float32, which holds them all."""
    types = {part.dtype for part in parts}
    dtype = _TYPES[parts[0].dtype] if len(types) == 1 else torch.float32
    merged = torch.empty(sum(part.shape[0] for part in parts), parts[0].shape[1], dtype=dtype)
    start = 0
    for part in parts:
        rows = merged[start : start + part.shape[0]]
        if dtype == _TYPES[part.dtype]:
            rows.view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(part.data, dtype=np.uint8)
        else:
            rows.copy_(torch.from_numpy(part.numpy().copy()).view(_TYPES[part.dtype]))
        start += part.shape[0]
    return merged
