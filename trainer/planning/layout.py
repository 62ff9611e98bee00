"""`Layout`: where this process stands among the ranks, how a batch is cut for them, and what counts alike."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from transport.wire.manifest import SampleColumns


class Weighting(StrEnum):
    """The unit that counts alike.

    The tokens of a unit are averaged first, then the units. `token` makes the whole mini-batch one unit, so every
    token counts alike; with the others every sample, trajectory or group does, however long it is.
    """

    TOKEN = "token"
    """Every trained token: long samples pull harder."""
    SAMPLE = "sample"
    """Every sample."""
    TRAJECTORY = "trajectory"
    """Every trajectory, whatever the number of its samples."""
    GROUP = "group"
    """Every group (its part in the mini-batch, if mini-batches split it)."""


def units_of(columns: SampleColumns, weighting: Weighting) -> tuple[npt.NDArray[np.int64], int]:
    """(unit of each row, number of units): units are numbered from 0 without gaps."""
    num_samples = columns.lengths.shape[0]
    if weighting is Weighting.TOKEN:
        return np.zeros(num_samples, dtype=np.int64), 1
    if weighting is Weighting.SAMPLE:
        return np.arange(num_samples), num_samples
    numbers = columns.trajectories if weighting is Weighting.TRAJECTORY else columns.groups
    names, units = np.unique(numbers.numpy(), return_inverse=True)
    return units.astype(np.int64), len(names)


class RowSharing(StrEnum):
    """Which samples may share a micro batch."""

    TEXT = "text"
    """Any; there are no image samples, because the model takes no images."""
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
