"""`TrainingSample`: one token sequence with everything the trainer needs to learn from it.

All per-token arrays have the length of `token_ids` and are aligned to the token they speak of: `logprobs[t]` is the
log probability of `token_ids[t]` given the tokens before it, `loss_mask[t]` says whether token `t` is trained.
Position 0 is never trained, because nothing predicts it.
"""

import math

import msgspec
import numpy as np

from transport.errors import CodecError
from transport.wire.tensor import Array, DType, EncodedTensor

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
