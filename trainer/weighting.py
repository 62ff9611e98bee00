"""`Weighting`: what counts alike in the mean that is minimised.

The tokens of a unit are averaged first, then the units. `token` makes the whole mini-batch one unit, so every token
counts alike; with the others every sample, trajectory or group does, however long it is.
"""

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from transport.wire.manifest import SampleColumns


class Weighting(StrEnum):
    """The unit that counts alike."""

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
