"""`MicroBatch`: samples laid end to end as one row of tokens, and what is known of each trained token.

T tokens of the row, S segments, L trained tokens. `seq_lens` is the only source of segment boundaries. The first
`sample_count` segments are samples; what follows is padding: a dummy image, or tokens that fill the row up. A dummy is
padding alone.
"""

from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.images.inputs import ImageInputs


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
