"""`Images`: the images of one prompt, and where their tokens stand. Pure: no model library is imported.

`requests.py` checks them.

Placeholders are runs of the image token, one run per image, one token per `merge_size` x `merge_size` patches.
"""

from dataclasses import dataclass

import numpy as np

from inference.api.arrays import Floats, Int64s, UInt8s


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What images must be for the model in service."""

    image_token_id: int
    media_token_ids: frozenset[int]
    """The image token and those of media that are not served, like videos."""
    merge_size: int
    num_patch_values: int
    """Length of one row of `pixel_values`."""


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """Images in the order of their placeholders."""

    pixel_values: Floats
    """float32[P, D], perhaps unaligned: it lies in the body of the request."""
    grids: Int64s
    """int64[N, 3]."""
    token_types: UInt8s
    """1 where a token of the prompt is a placeholder."""
    merge_size: int
    digest: bytes

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Start and end of each image's placeholders in the prompt."""
        return _runs(self.token_types)

    @property
    def patches(self) -> list[Floats]:
        """The rows of `pixel_values` of each image."""
        return np.split(self.pixel_values, self.grids.prod(axis=1).cumsum()[:-1])

    @property
    def rotary_offset(self) -> int:
        """How far behind its index the rotary position of a token after all images is: zero or negative."""
        rows, columns = (self.grids[:, axis] // self.merge_size for axis in (1, 2))
        return int((np.maximum(rows, columns) - rows * columns).sum())

    def positions(self, length: int) -> Int64s:
        """int64[3, length]: time, row and column of every token; text counts on in all three."""
        positions = np.zeros((3, length), np.int64)
        index = position = 0
        for (start, end), (_, height, width) in zip(self.runs, self.grids.tolist(), strict=True):
            rows, columns = height // self.merge_size, width // self.merge_size
            text = start - index
            positions[:, index:start] = position + np.arange(text)
            position += text
            positions[0, start:end] = position
            positions[1, start:end] = position + np.arange(rows).repeat(columns)
            positions[2, start:end] = position + np.tile(np.arange(columns), rows)
            index, position = end, position + max(rows, columns)
        positions[:, index:] = position + np.arange(length - index)
        return positions


def _runs(types: UInt8s) -> list[tuple[int, int]]:
    borders = np.flatnonzero(np.diff(types, prepend=np.uint8(0), append=np.uint8(0))).tolist()
    return list(zip(borders[::2], borders[1::2], strict=True))
