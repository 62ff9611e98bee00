"""Weight functions of a user, found by import path."""

import numpy as np

from orchestrator.data.curriculum import ExampleStats, Float64s


def only_first(stats: ExampleStats, *, number: int) -> Float64s:
    """The first `number` examples and no others."""
    return (np.arange(len(stats.num_visits)) < number).astype(np.float64)


def raises(stats: ExampleStats) -> Float64s:
    """A bug of the user's."""
    raise KeyError("table")


def too_few(stats: ExampleStats) -> Float64s:
    """One number is missing."""
    return np.ones(len(stats.num_visits) - 1)


def nothing(stats: ExampleStats) -> Float64s:
    """No example is wanted."""
    return np.zeros(len(stats.num_visits))


def negative(stats: ExampleStats) -> Float64s:
    """Not a weight."""
    return np.where(stats.num_visits > 0, 1.0, -1.0)
