"""`Layout`: where this process stands among the ranks, and how a batch is cut for them."""

from dataclasses import dataclass
from enum import StrEnum

from trainer.weighting import Weighting


class RowSharing(StrEnum):
    """Which samples may share a micro batch."""

    TEXT = "text"
    """Any; there are no image samples, because the model cannot see."""
    ALL = "all"
    """Any, text and images alike."""
    MODALITY = "modality"
    """Text with text, and samples with images among themselves."""


@dataclass(frozen=True)
class Layout:
    """All that a plan needs besides the manifest. All but `rank` is the same on every rank, and so is the plan."""

    rank: int
    world_size: int
    micro_batch_tokens: int
    """Cap on one micro batch."""
    seq_len: int
    """Cap on one sample: a longer one is trained cut to this length."""
    num_mini_batches: int = 1
    """Parts of a batch, each an optimizer step."""
    num_epochs: int = 1
    """Times that every mini-batch is trained."""
    weighting: Weighting = Weighting.TOKEN
    """What counts alike within a mini-batch."""
    seed: int = 0
    """Of the order of mini-batches after the first epoch."""
    cp: int = 1
    """Ranks that share each row."""
    sharing: RowSharing = RowSharing.TEXT
    """Which samples share micro batches, and whether there may be images at all."""

    @property
    def dp_size(self) -> int:
        """Number of ranks that train different samples."""
        return self.world_size // self.cp

    @property
    def dp_rank(self) -> int:
        """Which of those this process is; ranks that share rows are the same one."""
        return self.rank // self.cp
