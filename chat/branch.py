"""`Branch`: one token sequence, exactly as the model saw and sampled it; `ImagePatches`: the images in it."""

from weakref import WeakValueDictionary

import msgspec
import numpy as np
import numpy.typing as npt

from transport.wire.sample import VersionSpan
from transport.wire.tensor import EncodedTensor


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


Int32s = npt.NDArray[np.int32]


Floats = npt.NDArray[np.float32]


Bools = npt.NDArray[np.bool_]


UInt8s = npt.NDArray[np.uint8]


class Branch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One token sequence of a trajectory: exactly what the model saw and sampled. All arrays have the same length."""

    token_ids: Int32s
    sampled: Bools
    """True where the policy sampled the token."""
    logprobs: Floats
    """Log probability of sampled tokens, 0 elsewhere."""
    versions: tuple[VersionSpan, ...]
    """Spans over the whole branch, sampled tokens only; empty if no policy of ours sampled them."""
    observed: Bools | None = None
    """True where the environment wrote the token after the first turn (`None`: nowhere); in one branch only, like
    `sampled`."""
    ref_logprobs: Floats | None = None
    """Log probability of every token under a teacher, 0 at position 0."""
    images: ImagePatches | None = None
    """What the model saw beside text, in the order of the tokens."""
    token_types: UInt8s | None = None
    """1 where a token stands for a part of an image; `None` without images. Sampled tokens are always 0."""

    def __post_init__(self) -> None:
        arrays = (self.token_ids, self.sampled, self.logprobs, self.observed, self.ref_logprobs, self.token_types)
        shapes = [array.shape for array in arrays if array is not None]
        if any(shape != (len(self.token_ids),) for shape in shapes):
            raise ValueError(f"the arrays of a branch differ in their shapes: {shapes}")
