"""`ImageSpec`: what a model's config says about images. Everything that packs or checks image samples goes by it."""

from dataclasses import dataclass

import numpy as np

from trainer.bins import IntArray

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
