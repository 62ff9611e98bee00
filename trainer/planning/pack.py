"""Samples to micro batches: one concatenation per column, no loop over tokens.

Samples come as `check_image_samples` leaves them: cut to `seq_len`. Absent weight streams mean `rl` = 1 and `ce` =
`ref_kl` = 0, on trained tokens; a weight on a token that `loss_mask` leaves out has no effect.

`MicroBatch`: samples laid end to end as one row of tokens, and what is known of each trained token.

T tokens of the row, S segments, L trained tokens. `seq_lens` is the only source of segment boundaries. The first
`sample_count` segments are samples; what follows is padding: a dummy image, or tokens that fill the row up. A dummy is
padding alone.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import BatchMismatch
from trainer.images.inputs import ImageInputs, dummy_image, merge_images
from trainer.images.spec import ImageSpec
from trainer.planning.plan import StepPlan
from transport.wire.sample import EncodedTensor, TrainingSample


@dataclass(frozen=True)
class RowPart:
    """Tokens `[start, stop)` of a row, which this rank computes; the ranks of `group` have the others."""

    group: dist.ProcessGroup
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Length of every part of the row."""
        return self.stop - self.start


@dataclass(frozen=True)
class SegmentInfo:
    """Made once per micro batch, shared by all layers."""

    seq_lens: tuple[int, ...]
    cu_seqlens: Tensor
    """int32[S + 1]: 0, then the end of each segment."""
    max_len: int
    part: RowPart | None = None
    """What the queries are of; `None`: of the whole row."""

    @classmethod
    def of(cls, seq_lens: tuple[int, ...], device: torch.device, part: RowPart | None = None) -> "SegmentInfo":
        """Segments of these lengths. Each must hold a token."""
        if not seq_lens or min(seq_lens) < 1:
            raise ValueError(f"every segment needs at least one token, got {seq_lens}")
        ends = torch.tensor((0, *seq_lens), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(seq_lens, ends.to(device), max(seq_lens), part)


@dataclass(frozen=True)
class LossTokens:
    """One entry per trained token, in row order. A weight stream without members is `None` and costs nothing."""

    index: Tensor
    """int64[L]: place of the token in the row. Its prediction is made at `index - 1`, always in the same segment."""
    segments: Tensor
    """int64[L]: segment of the token."""
    labels: Tensor
    """int64[L]: the token."""
    logprobs: Tensor
    """float32[L]: under the behaviour policy, at `temperatures`."""
    advantages: Tensor
    """float32[L]."""
    temperatures: Tensor
    """float32[L]."""
    rl_weights: Tensor | None
    """float32[L]; 0: not a member of the component."""
    ce_weights: Tensor | None
    """float32[L]; 0: not a member of the component."""
    ref_kl_weights: Tensor | None
    """float32[L]; 0: not a member of the component."""
    ref_logprobs: Tensor | None
    """float32[L]: under the reference policy; never `None` when `ref_kl_weights` is not."""

    def to(self, device: torch.device) -> "LossTokens":
        columns: dict[str, Tensor | None] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: column.to(device) for name, column in columns.items() if column is not None})


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass."""

    token_ids: Tensor
    """int64[T]."""
    position_ids: Tensor
    """int64[T]: from 0 in every segment."""
    seq_lens: tuple[int, ...]
    """Length of each segment, in order; they sum to T."""
    sample_count: int
    """Leading segments that are samples."""
    env_ids: Tensor
    """int64[sample_count]: index into the plan's `env_names`."""
    units: Tensor
    """int64[sample_count]: unit of each sample, as the plan's `Weighting` cuts the batch."""
    rewards: Tensor
    """float32[sample_count]."""
    advantages: Tensor
    """float32[sample_count]: of the sample, or the mean over its trained tokens."""
    sample_rows: tuple[int, ...]
    """Row of each sample in the manifest."""
    loss_tokens: LossTokens
    images: ImageInputs | None = None
    """`None`: the vision tower does not run."""
    part: RowPart | None = None
    """Which tokens of the row `token_ids` and `position_ids` hold; `None`: all. The rest speaks of the whole row."""

    @property
    def is_dummy(self) -> bool:
        """Whether it has no samples: it only keeps the ranks in lock-step."""
        return self.sample_count == 0

    @property
    def num_tokens(self) -> int:
        """Tokens of samples; padding does not count."""
        return sum(self.seq_lens[: self.sample_count])

    @property
    def num_loss_tokens(self) -> int:
        return self.loss_tokens.index.shape[0]

    @property
    def token_units(self) -> Tensor:
        """int64[L]: unit of each trained token."""
        return self.units[self.loss_tokens.segments]

    def segment_info(self) -> SegmentInfo:
        """Boundaries as attention kernels want them, on the device of the tokens."""
        return SegmentInfo.of(self.seq_lens, self.token_ids.device, self.part)

    def to(self, device: torch.device) -> "MicroBatch":
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            position_ids=self.position_ids.to(device),
            env_ids=self.env_ids.to(device),
            units=self.units.to(device),
            rewards=self.rewards.to(device),
            advantages=self.advantages.to(device),
            loss_tokens=self.loss_tokens.to(device),
            images=None if self.images is None else self.images.to(device),
        )


Floats = npt.NDArray[np.float32]
PADDING_TOKEN_ID = 0
"""Any valid id: padding is a segment of its own, so no sample sees it."""


def pack_mini_batch(
    plan: StepPlan,
    mini_batch_index: int,
    rank: int,
    samples: Mapping[int, TrainingSample],
    pad_multiple: int = 1,
    images: ImageSpec | None = None,
    refused: Collection[int] = (),
) -> list[MicroBatch]:
    """The micro batches of `rank`, in the order of the plan, dummies included.

    `samples` maps manifest rows to samples; `refused` rows are left out, whatever the plan says. Raises
    `BatchMismatch` if one is missing or is not what the manifest said.
    """
    mini_batch = plan.mini_batches[mini_batch_index]
    micro_batches = []
    for round_index in range(mini_batch.num_rounds):
        rows = [row for row in mini_batch.micro_batch_rows(rank, round_index).tolist() if row not in refused]
        _check_rows(plan, rows, samples)
        env_ids = [plan.env_names.index(samples[row].env_name) for row in rows]
        units = plan.units[rows].tolist()
        needs_image = bool(mini_batch.image_rounds[round_index])
        chosen = [samples[row] for row in rows]
        micro_batches.append(pack(chosen, env_ids, rows, pad_multiple, units, images=images, needs_image=needs_image))
    return micro_batches


def pack(
    samples: Sequence[TrainingSample],
    env_ids: Sequence[int],
    rows: Sequence[int],
    pad_multiple: int = 1,
    units: Sequence[int] | None = None,
    *,
    images: ImageSpec | None = None,
    needs_image: bool = False,
) -> MicroBatch:
    """One micro batch. No samples: a dummy of one token. `pad_multiple` rounds the row up with a padding segment.

    `units` are those of the plan; `None`: every token of the batch counts alike. `needs_image`: other ranks have an
    image in this round, so a row without any gets a dummy image, as a segment of one token.
    """
    seq_lens = [sample.num_tokens for sample in samples]
    has_image = any(sample.mm_kwargs for sample in samples)
    extra_lens = _padding_lens(sum(seq_lens), pad_multiple, has_dummy_image=needs_image and not has_image)
    token_ids = [sample.token_ids.numpy() for sample in samples]
    all_lens = (*seq_lens, *extra_lens)
    position_ids = torch.from_numpy(np.concatenate([np.arange(length) for length in all_lens]))
    image_inputs = None
    if needs_image or has_image:
        assert images is not None, "image samples were planned for a model that cannot see"
        image_inputs = (
            merge_images(samples, images, sum(extra_lens))
            if has_image
            else dummy_image(position_ids, sum(seq_lens), images)
        )
    return MicroBatch(
        token_ids=torch.from_numpy(
            np.concatenate([*token_ids, np.full(sum(extra_lens), PADDING_TOKEN_ID)]).astype(np.int64)
        ),
        position_ids=position_ids,
        seq_lens=all_lens,
        sample_count=len(samples),
        env_ids=torch.tensor(env_ids, dtype=torch.int64),
        units=torch.tensor([0] * len(samples) if units is None else units, dtype=torch.int64),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        advantages=torch.tensor([_sample_advantage(sample) for sample in samples], dtype=torch.float32),
        sample_rows=tuple(rows),
        loss_tokens=_loss_tokens(samples, seq_lens),
        images=image_inputs,
    )


def _padding_lens(num_tokens: int, pad_multiple: int, *, has_dummy_image: bool) -> tuple[int, ...]:
    """Lengths of the segments behind the samples: the dummy image, and what fills the row up."""
    dummy = (1,) if has_dummy_image else ()
    filled = num_tokens + sum(dummy)
    num_padding = -filled % pad_multiple if filled else pad_multiple
    return (*dummy, num_padding) if num_padding else dummy


def _check_rows(plan: StepPlan, rows: Sequence[int], samples: Mapping[int, TrainingSample]) -> None:
    for row in rows:
        if row not in samples:
            raise BatchMismatch(f"row {row} of batch {plan.step} was planned but not fetched")
        sample = samples[row]
        length, planned = sample.num_tokens, int(plan.lengths[row])
        is_cut = sample.mm_token_type_ids is not None and length < planned == plan.seq_len  # before an image
        if (length != planned and not is_cut) or sample.env_name not in plan.env_names:
            raise BatchMismatch(
                f"row {row} of batch {plan.step} is {sample.trajectory_id} of env {sample.env_name!r} with "
                f"{length} tokens, which its manifest does not say"
            )


def _loss_tokens(samples: Sequence[TrainingSample], seq_lens: Sequence[int]) -> LossTokens:
    mask = np.concatenate([*(sample.loss_mask.numpy() for sample in samples), np.zeros(0, dtype=np.bool_)])

    def column(values: Sequence[float | EncodedTensor | None], dtype: type[np.generic] = np.float32) -> Tensor:
        parts = [_expand(value, length, dtype) for value, length in zip(values, seq_lens, strict=True)]
        return torch.from_numpy(np.concatenate([*parts, np.zeros(0, dtype=dtype)])[mask])

    ref_kl_weights = _members(column([sample.ref_kl_weights for sample in samples]))
    return LossTokens(
        index=torch.from_numpy(np.flatnonzero(mask)),
        segments=torch.from_numpy(np.repeat(np.arange(len(samples)), seq_lens)[mask]),
        labels=column([sample.token_ids for sample in samples], np.int64),
        logprobs=column([sample.logprobs for sample in samples]),
        advantages=column([sample.advantages for sample in samples]),
        temperatures=column([sample.temperature for sample in samples]),
        rl_weights=_members(column([1.0 if s.rl_weights is None else s.rl_weights for s in samples])),
        ce_weights=_members(column([sample.ce_weights for sample in samples])),
        ref_kl_weights=ref_kl_weights,
        ref_logprobs=None if ref_kl_weights is None else column([_reference(sample) for sample in samples]),
    )


def _expand(value: float | EncodedTensor | None, length: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    if isinstance(value, EncodedTensor):
        return value.numpy().astype(dtype, copy=False)
    return np.full(length, value or 0.0, dtype=dtype)


def _members(weights: Tensor) -> Tensor | None:
    return weights if bool((weights != 0).any()) else None


def _reference(sample: TrainingSample) -> EncodedTensor | None:
    if sample.ref_kl_weights is not None and sample.ref_logprobs is None:
        raise BatchMismatch(f"{sample.trajectory_id} has ref_kl_weights but no ref_logprobs to measure against")
    return sample.ref_logprobs


def _sample_advantage(sample: TrainingSample) -> float:
    if not isinstance(sample.advantages, EncodedTensor):
        return sample.advantages
    trained = sample.advantages.numpy()[sample.loss_mask.numpy()]
    return float(trained.mean()) if trained.size else 0.0
