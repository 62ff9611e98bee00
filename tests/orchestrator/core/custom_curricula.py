"""Weight functions of a user, found by import path."""

import numpy as np

from orchestrator.curriculum.weights import ExampleStats, Floats


def only_first(stats: ExampleStats, *, number: int) -> Floats:
    """The first `number` examples and no others."""
    return (np.arange(len(stats.num_visits)) < number).astype(np.float64)


def raises(stats: ExampleStats) -> Floats:
    """A bug of the user's."""
    raise KeyError("table")


def too_few(stats: ExampleStats) -> Floats:
    """One number is missing."""
    return np.ones(len(stats.num_visits) - 1)


def nothing(stats: ExampleStats) -> Floats:
    """No example is wanted."""
    return np.zeros(len(stats.num_visits))


def negative(stats: ExampleStats) -> Floats:
    """Not a weight."""
    return np.where(stats.num_visits > 0, 1.0, -1.0)
