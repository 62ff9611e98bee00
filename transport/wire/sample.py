"""`TrainingSample`: one token sequence with everything the trainer needs to learn from it.

All per-token arrays have the length of `token_ids` and are aligned to the token they speak of: `logprobs[t]` is the
log probability of `token_ids[t]` given the tokens before it, `loss_mask[t]` says whether token `t` is trained.
Position 0 is never trained, because nothing predicts it.

`EncodedTensor`: the one representation of an array on the wire, in the outbox and in the orchestrator's buffers.

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


_FLOAT_STREAMS = ("logprobs", "advantages", "ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")


class VersionSpan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Tokens `[start, end)` were sampled by policy `version`."""

    version: int
    start: int
    end: int


class TrainingSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One sequence. `check()` states the invariants; the codec calls it on both sides of the wire."""

    run_id: str
    env_name: str
    example_id: str
    group_id: str
    """`env_name/example_id/attempt`: two visits of one example are two groups."""
    trajectory_id: str
    step_index: int = 0
    """Position among the samples of one trajectory (0 unless the trajectory branched)."""
    token_ids: EncodedTensor
    """int32[T]: prompt and completion."""
    loss_mask: EncodedTensor
    """bool[T]."""
    logprobs: EncodedTensor
    """float32[T] of the behaviour policy, at `temperature`; 0 where the policy did not sample the token."""
    advantages: float | EncodedTensor
    """One number for the sequence, or float32[T]."""
    temperature: float
    reward: float
    versions: tuple[VersionSpan, ...]
    """Which policy sampled which tokens, in order; empty only for samples that no policy of ours generated."""
    ref_logprobs: EncodedTensor | None = None
    rl_weights: EncodedTensor | None = None
    ce_weights: EncodedTensor | None = None
    ref_kl_weights: EncodedTensor | None = None
    mm_kwargs: dict[str, EncodedTensor] = {}
    """Inputs of the model's forward by name (`pixel_values`, `image_grid_thw`, ...)."""
    mm_token_type_ids: EncodedTensor | None = None
    """uint8[T]: modality of each token."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask.numpy()))

    @property
    def oldest_version(self) -> int | None:
        """The version that staleness is counted from."""
        return min((span.version for span in self.versions), default=None)

    def check(self) -> None:
        """Raise `CodecError`, naming the field, unless the sample is sound."""
        if len(self.token_ids.shape) != 1 or self.num_tokens == 0:
            shape = self.token_ids.shape
            raise CodecError(f"token_ids of {self.trajectory_id} must be a non-empty vector, got {shape}")
        self._check_stream("token_ids", self.token_ids, "int32")
        self._check_stream("loss_mask", self.loss_mask, "bool")
        for name in _FLOAT_STREAMS:
            stream = getattr(self, name)
            if isinstance(stream, EncodedTensor):
                self._check_stream(name, stream, "float32")
                if not _is_finite(stream.numpy()):
                    raise CodecError(f"{name} of {self.trajectory_id} holds a NaN or an infinity")
        self._check_mask()
        self._check_scalars()
        if self.mm_token_type_ids is not None:
            self._check_stream("mm_token_type_ids", self.mm_token_type_ids, "uint8")
        for tensor in self.mm_kwargs.values():
            tensor.check()

    def _check_stream(self, name: str, stream: EncodedTensor, dtype: DType) -> None:
        if not stream.is_vector(dtype, self.num_tokens):
            expected, got = f"{dtype}[{self.num_tokens}]", f"{stream.dtype}{list(stream.shape)}"
            raise CodecError(f"{name} of {self.trajectory_id} must be {expected}, got {got}, {stream.num_bytes} bytes")

    def _check_mask(self) -> None:
        mask = self.loss_mask.numpy().view(np.uint8)
        if np.maximum.reduce(mask) > 1:
            raise CodecError(f"loss_mask of {self.trajectory_id} holds a byte that is neither 0 nor 1")
        if mask[0]:
            raise CodecError(f"loss_mask of {self.trajectory_id} trains position 0, which nothing predicts")

    def _check_scalars(self) -> None:
        if not math.isfinite(self.temperature) or self.temperature <= 0:
            raise CodecError(f"temperature of {self.trajectory_id} must be positive, got {self.temperature}")
        if not math.isfinite(self.reward):
            raise CodecError(f"reward of {self.trajectory_id} is {self.reward}")
        if isinstance(self.advantages, float) and not math.isfinite(self.advantages):
            raise CodecError(f"advantages of {self.trajectory_id} is {self.advantages}")
        for span in self.versions:
            if not 0 <= span.start < span.end <= self.num_tokens or span.version < 0:
                raise CodecError(f"versions of {self.trajectory_id} has {span}, outside its {self.num_tokens} tokens")


def _is_finite(values: Array) -> bool:
    """A finite sum of squares proves finite values, at the speed of memory; only huge values need a second look."""
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(np.dot(values, values)) or bool(np.isfinite(values).all())
