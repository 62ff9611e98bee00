"""`ImageSpec`: what a model's config says about images, and where those of a sample stand among its tokens.

Blocks are told apart by the sizes of the images, not by what stands between them, so two images may touch.
"""

from dataclasses import dataclass

import numpy as np

from trainer.arrays import IntArray
from transport.wire.sample import Array, TrainingSample

PIXELS, GRIDS = "pixel_values", "image_grid_thw"
"""Names of `mm_kwargs`: patches of all images of a sample [P, numbers per patch], and (t, h, w) patches of each [N, 3].
"""
IMAGE_TYPE = 1
"""Value of `mm_token_type_ids` for a token that stands for a piece of an image; 0 is text."""


@dataclass(frozen=True)
class ImageSpec:
    """The image side of one model."""

    image_token_id: int
    """Token that stands for `merge_size`^2 patches."""
    merge_size: int
    """Patches per token, along each side."""
    patch_numbers: int
    """Numbers in one patch: channels x frames x height x width."""

    def tokens_per_image(self, grids: IntArray) -> IntArray:
        """int64[N]: tokens of each image of `grids` [N, 3]."""
        tokens: IntArray = grids.prod(axis=1) // self.merge_size**2
        return tokens

    @property
    def smallest_grid(self) -> IntArray:
        """int64[1, 3]: the grid of an image of one token."""
        return np.array([[1, self.merge_size, self.merge_size]], dtype=np.int64)


def grids_of(sample: TrainingSample) -> IntArray:
    """int64[N, 3]: patches of each image along time, height and width."""
    grids = sample.mm_kwargs.get(GRIDS)
    return np.zeros((0, 3), dtype=np.int64) if grids is None else grids.numpy().astype(np.int64)


def image_tokens_of(sample: TrainingSample) -> IntArray:
    """int64[I]: places of the image tokens, ascending."""
    types = sample.mm_token_type_ids
    return np.zeros(0, dtype=np.int64) if types is None else np.flatnonzero(types.numpy() == IMAGE_TYPE)


def block_starts(places: IntArray, grids: IntArray, spec: ImageSpec) -> IntArray:
    """int64[N]: place of the first token of each image; `places` are those of all image tokens."""
    tokens = spec.tokens_per_image(grids)
    starts: IntArray = places[np.cumsum(tokens) - tokens]
    return starts


def are_whole(places: IntArray, grids: IntArray, spec: ImageSpec) -> bool:
    """Whether no image has a token of something else inside its block."""
    ends = np.cumsum(spec.tokens_per_image(grids))
    gaps = np.flatnonzero(np.diff(places) != 1) + 1
    return bool(np.isin(gaps, ends).all())


def rope_positions(num_tokens: int, starts: IntArray, grids: IntArray, spec: ImageSpec) -> IntArray:
    """int64[3, num_tokens]: position of each token along time, height and width (MRoPE of the Qwen-VL family).

    Text counts up on all three. An image spreads over its merged grid, and what follows goes on after its longer side.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    token, position = 0, 0
    for start, (frames, height, width) in zip(starts.tolist(), grids.tolist(), strict=True):
        positions[:, token:start] = np.arange(position, position + start - token)
        position += start - token
        rows, columns = height // spec.merge_size, width // spec.merge_size
        token = start + frames * rows * columns
        positions[:, start:token] = position + np.indices((frames, rows, columns)).reshape(3, -1)
        position += max(rows, columns)
    positions[:, token:] = np.arange(position, position + num_tokens - token)
    return positions


def is_finite(array: Array, dtype: str) -> bool:
    """Whether no pixel is a NaN or an infinity."""
    if dtype == "bfloat16":  # comes as bit patterns: an exponent of all ones is not a number
        return not bool(((array & 0x7F80) == 0x7F80).any())
    # A finite sum proves finite pixels, and reads an array that is not aligned without a copy. Huge pixels: look again.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(array.sum()) or np.isfinite(array).all())
