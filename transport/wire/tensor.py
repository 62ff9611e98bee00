"""`EncodedTensor`: the one representation of an array on the wire, in the outbox and in the orchestrator's buffers.

Little-endian raw bytes. Decoding gives a read-only view of the receive buffer, not a copy, so a decoded tensor keeps
that buffer alive and is not aligned: `numpy.concatenate` and `torch.frombuffer(...).clone()` both cope.
"""

import math
import sys
from typing import Any, Literal, cast, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from transport.errors import CodecError

DType = Literal[
    "bool", "uint8", "int8", "uint16", "int16", "int32", "int64", "uint64", "float16", "bfloat16", "float32", "float64"
]
Array = npt.NDArray[Any]
Buffer = bytes | bytearray | memoryview

MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 40
"""Bounds on a shape that a peer sends; zeros count as ones, so that an empty tensor cannot have absurd sizes."""

_NUMPY_DTYPES = {name: np.dtype("uint16" if name == "bfloat16" else name) for name in get_args(DType)}
_WIRE_NAMES = {dtype: dtype.name for dtype in _NUMPY_DTYPES.values()}
DTYPE_BYTES: dict[str, int] = {name: dtype.itemsize for name, dtype in _NUMPY_DTYPES.items()}

if sys.byteorder != "little":
    raise ImportError("tandem-rl's wire format is little-endian and is only implemented on little-endian machines")


class EncodedTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """`dtype`, `shape` and the raw little-endian bytes. `check()` holds for every tensor that passed the codec."""

    dtype: DType
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of(cls, array: Array) -> "EncodedTensor":
        """Encode a numpy array. A C-contiguous array is not copied: do not change it afterwards."""
        name = _WIRE_NAMES.get(array.dtype) or array.dtype.name  # the lookup: numpy spends 10 us on a name
        if name not in DTYPE_BYTES:
            raise CodecError(f"dtype {name!r} has no wire form; use one of {sorted(DTYPE_BYTES)}")
        flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
        return cls(cast(DType, name), array.shape, flat.view(np.uint8).data)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def check(self) -> None:
        """Raise `CodecError` unless shape and dtype agree with the number of bytes."""
        if any(size < 0 for size in self.shape) or len(self.shape) > MAX_DIMENSIONS:
            raise CodecError(f"shape {self.shape} has a negative size or more than {MAX_DIMENSIONS} dimensions")
        if math.prod(max(size, 1) for size in self.shape) > MAX_ELEMENTS:
            raise CodecError(f"shape {self.shape} has more than {MAX_ELEMENTS} elements")
        expected = math.prod(self.shape) * DTYPE_BYTES[self.dtype]
        if expected != self.data.nbytes:
            raise CodecError(f"{self.dtype}{list(self.shape)} needs {expected} bytes, got {self.data.nbytes}")

    def numpy(self) -> Array:
        """A read-only view. `bfloat16` has no numpy dtype: it comes as `uint16` bit patterns."""
        flat = np.frombuffer(self.data, dtype=_NUMPY_DTYPES[self.dtype])
        return flat if len(self.shape) == 1 else flat.reshape(self.shape)

    def is_vector(self, dtype: DType, num_elements: int) -> bool:
        """Whether this is a sound vector of that type and size. Cheaper than `check`."""
        return (
            self.dtype == dtype
            and self.shape == (num_elements,)
            and self.data.nbytes == num_elements * DTYPE_BYTES[dtype]
        )
