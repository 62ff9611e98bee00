"""`Pictures`: one or more pictures as the model's vision tower takes them."""

from weakref import WeakValueDictionary

import msgspec
import numpy as np

from transport.wire.tensor import EncodedTensor


class Pictures(msgspec.Struct, frozen=True, eq=False, weakref=True, forbid_unknown_fields=True):
    """Patches of pictures in the order of their placeholders. Shared, never copied: do not change the arrays."""

    digests: tuple[str, ...]
    """Which pictures: one digest each."""
    pixel_values: EncodedTensor
    """float32[P, D]: all patches of all pictures."""
    image_grid_thw: EncodedTensor
    """int64[N, 3]: time, height and width of each picture, in patches."""

    def __post_init__(self) -> None:
        for tensor in self.mm_kwargs.values():
            tensor.check()

    @property
    def mm_kwargs(self) -> dict[str, EncodedTensor]:
        """Inputs of the model's forward, by name."""
        return {"pixel_values": self.pixel_values, "image_grid_thw": self.image_grid_thw}

    @property
    def num_patches(self) -> list[int]:
        """Patches of each picture."""
        counts: list[int] = self.image_grid_thw.numpy().prod(axis=1).tolist()
        return counts


PictureShelf = WeakValueDictionary[tuple[str, ...], Pictures]
"""Pictures that somebody holds, by their digests: equal digests are equal pictures. It keeps nothing alive."""


def joined(parts: "list[Pictures]") -> Pictures:
    """All pictures of `parts`, in order; the only one itself, without a copy."""
    if len(parts) == 1:
        return parts[0]
    return Pictures(
        tuple(digest for part in parts for digest in part.digests),
        EncodedTensor.of(np.concatenate([part.pixel_values.numpy() for part in parts])),
        EncodedTensor.of(np.concatenate([part.image_grid_thw.numpy() for part in parts])),
    )
