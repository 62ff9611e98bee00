"""`PatchMaker`: an image to the patches of a Qwen-VL vision tower, as `Qwen2VLImageProcessorPil` makes them.

    any image ──RGB──▶ resized (bicubic, sides a multiple of patch x merge) ──table──▶ normalised ──▶ patches [P, D]

Rescaling and normalising depend on channel and byte only, so they are a table of 3 x 256 floats, computed with the
arithmetic of transformers: float64 product, float32 difference and quotient. `ImagePatches` are those of a prompt.
"""

import math
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from chat.errors import ImageError
from transport.wire.sample import EncodedTensor

MAX_ASPECT = 200
Patches = npt.NDArray[np.float32]


class PatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `preprocessor_config.json` says; defaults are those of transformers."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255
    resample: int = Image.Resampling.BICUBIC
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True

    @property
    def factor(self) -> int:
        """Both sides of a resized image are a multiple of this many pixels."""
        return self.patch_size * self.merge_size


class PatchGrid(NamedTuple):
    """One image in patches: float32[h * w, D] in merge order, and its grid."""

    patches: Patches
    height: int
    width: int


class PatchMaker:
    """Pure but for its table. One instance may be used from several threads."""

    def __init__(self, settings: PatchSettings) -> None:
        self.settings = settings
        self._table = _table(settings)

    def cut(self, image: Image.Image) -> PatchGrid:
        """The patches of `image`. Raises `ImageError` for one that cannot be resized to fit."""
        settings = self.settings
        image = image.convert("RGB")
        if settings.do_resize:
            height, width = smart_resize(image.height, image.width, settings)
            image = image.resize((width, height), resample=settings.resample)
        if image.height % settings.factor or image.width % settings.factor:
            raise ImageError(f"an image of {image.width}x{image.height} is not a multiple of {settings.factor} pixels")
        planes = self._table[np.arange(3)[:, None, None], np.asarray(image).transpose(2, 0, 1)]  # [3, H, W]
        return _patchify(planes, settings)


def smart_resize(height: int, width: int, settings: PatchSettings) -> tuple[int, int]:
    """Sides that are multiples of `factor`, with about the same aspect, and an area within the allowed pixels."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ImageError(f"an image of {width}x{height} is more than {MAX_ASPECT} times as long as wide")
    factor = settings.factor
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > settings.max_pixels:
        shrink = math.sqrt(height * width / settings.max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (height * width))
        rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rows, columns


def _table(settings: PatchSettings) -> npt.NDArray[np.float32]:
    """float32[3, 256]: what each byte of each channel becomes."""
    values = np.broadcast_to(np.arange(256), (3, 256))
    scale = settings.rescale_factor if settings.do_rescale else 1.0
    table = (values.astype(np.float64) * scale).astype(np.float32)
    if settings.do_normalize:
        mean, std = (np.array(row, np.float32)[:, None] for row in (settings.image_mean, settings.image_std))
        table = (table - mean) / std
    return table


def _patchify(planes: npt.NDArray[np.float32], settings: PatchSettings) -> PatchGrid:
    """Patches of `planes[3, H, W]`: those that are merged later lie side by side; a still image repeats over time."""
    size, merge, time = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    height, width = planes.shape[1] // size, planes.shape[2] // size
    blocks = planes.reshape(3, height // merge, merge, size, width // merge, merge, size)
    blocks = blocks.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]  # [H', W', m, m, 3, 1, size, size]
    blocks = np.broadcast_to(blocks, (*blocks.shape[:5], time, size, size))
    return PatchGrid(blocks.reshape(height * width, 3 * time * size * size), height, width)


class ImagePatches(msgspec.Struct, frozen=True, eq=False, weakref=True, forbid_unknown_fields=True):
    """Patches of images in the order of their placeholders. Shared, never copied: do not change the arrays."""

    digests: tuple[str, ...]
    """Which images: one digest each."""
    pixel_values: EncodedTensor
    """float32[P, D]: all patches of all images."""
    image_grid_thw: EncodedTensor
    """int64[N, 3]: time, height and width of each image, in patches."""

    def __post_init__(self) -> None:
        for tensor in self.mm_kwargs.values():
            tensor.check()

    @property
    def mm_kwargs(self) -> dict[str, EncodedTensor]:
        """Inputs of the model's forward, by name."""
        return {"pixel_values": self.pixel_values, "image_grid_thw": self.image_grid_thw}

    @property
    def num_patches(self) -> list[int]:
        counts: list[int] = self.image_grid_thw.numpy().prod(axis=1).tolist()
        return counts


ImageCache = WeakValueDictionary[tuple[str, ...], ImagePatches]
"""Weak references to images in use, by their digests: equal digests are equal images."""


def joined_patches(parts: list[ImagePatches]) -> ImagePatches:
    """All images of `parts`, in order; the only one itself, without a copy."""
    if len(parts) == 1:
        return parts[0]
    return ImagePatches(
        tuple(digest for part in parts for digest in part.digests),
        EncodedTensor.of(np.concatenate([part.pixel_values.numpy() for part in parts])),
        EncodedTensor.of(np.concatenate([part.image_grid_thw.numpy() for part in parts])),
    )
