"""`Images`: the images of one prompt, checked, and where their tokens stand. Pure: no model library is imported.

Placeholders are runs of the image token, one run per image, one token per `merge_size` x `merge_size` patches.
"""

from dataclasses import dataclass

import numpy as np
import xxhash

from inference.api.arrays import Floats, Int32s, Int64s, UInt8s
from inference.errors import BadRequest
from transport.errors import CodecError
from transport.wire.generation import GenerateRequest
from transport.wire.sample import Array, EncodedTensor

FIELDS = frozenset({"pixel_values", "image_grid_thw"})


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


def images_of(request: GenerateRequest, limits: ImageLimits | None) -> Images | None:
    """The images of `request`, shapes checked. Raises `BadRequest`."""
    if not request.mm_kwargs and request.mm_token_type_ids is None:
        return None
    if limits is None:
        raise BadRequest("the model in service takes no images: Qwen2.5-VL and Qwen3-VL do")
    if request.mm_kwargs.keys() != FIELDS or request.mm_token_type_ids is None:
        raise BadRequest(f"images need mm_token_type_ids and mm_kwargs with exactly {', '.join(sorted(FIELDS))}")
    pixels = _array("pixel_values", request.mm_kwargs["pixel_values"], "float32", 2)
    grids = _array("image_grid_thw", request.mm_kwargs["image_grid_thw"], "int64", 2)
    types = _array("mm_token_type_ids", request.mm_token_type_ids, "uint8", 1)
    _check_shapes(pixels, grids, limits)
    digest = xxhash.xxh3_128(request.mm_kwargs["pixel_values"].data)
    digest.update(request.mm_kwargs["image_grid_thw"].data)
    return Images(pixels, grids, types, limits.merge_size, digest.digest())


def check_placeholders(prompt: Int32s, images: Images | None, limits: ImageLimits) -> None:
    """Raise `BadRequest` unless every placeholder in `prompt` has its patch, and every patch its placeholder."""
    foreign = [token for token in limits.media_token_ids if token != limits.image_token_id]
    if np.isin(prompt, foreign).any():
        raise BadRequest("the prompt has placeholders of media other than images, which are not served")
    is_placeholder = prompt == limits.image_token_id
    types = np.zeros(len(prompt), np.uint8) if images is None else images.token_types
    if len(types) != len(prompt) or (types != is_placeholder).any():
        raise BadRequest("mm_token_type_ids must be 1 exactly at the image tokens of the prompt")
    if images is None:
        return
    if is_placeholder[-1]:
        raise BadRequest("the prompt ends within an image: there must be a token of text after it")
    sizes = (images.grids.prod(axis=1) // limits.merge_size**2).tolist()
    if (runs := [end - start for start, end in images.runs]) != sizes:
        raise BadRequest(f"the runs of image tokens are {runs} long, the images need {sizes}")


def _array(name: str, tensor: EncodedTensor, dtype: str, dimensions: int) -> Array:
    try:
        tensor.check()
    except CodecError as error:
        raise BadRequest(f"{name}: {error}") from error
    if tensor.dtype != dtype or len(tensor.shape) != dimensions:
        raise BadRequest(f"{name} must be {dtype} of {dimensions} dimensions, got {tensor.dtype}{list(tensor.shape)}")
    return tensor.numpy()


def _check_shapes(pixels: Floats, grids: Int64s, limits: ImageLimits) -> None:
    if grids.shape[0] == 0 or grids.shape[1] != 3:
        raise BadRequest(f"image_grid_thw must be int64[N, 3] with N > 0, got {list(grids.shape)}")
    if (grids[:, 0] != 1).any() or (grids[:, 1:] < 1).any() or (grids[:, 1:] % limits.merge_size).any():
        raise BadRequest(f"a grid must be 1 x height x width in multiples of {limits.merge_size}: {grids.tolist()}")
    # Bounded before it is multiplied: a peer chose these numbers.
    if grids.max() > len(pixels) or pixels.shape != (grids.prod(axis=1).sum(), limits.num_patch_values):
        expected = f"[patches of the grids, {limits.num_patch_values}]"
        raise BadRequest(f"pixel_values must be {expected}, got {list(pixels.shape)} for grids {grids.tolist()}")
    if not np.isfinite(pixels).all():
        raise BadRequest("pixel_values holds a NaN or an infinity")


def _runs(types: UInt8s) -> list[tuple[int, int]]:
    borders = np.flatnonzero(np.diff(types, prepend=np.uint8(0), append=np.uint8(0))).tolist()
    return list(zip(borders[::2], borders[1::2], strict=True))
