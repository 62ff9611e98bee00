"""The contract of advantage functions, and the one place that holds them to it.

First pass, when a group is final: the function is called once with one group of any size >= 1 and gives one finite
number per rollout, in their order. Second pass, when the batch is cut, only for functions that normalise over the
batch: it sees what the first pass gave to all rollouts of one environment in the batch, in dispatch order. Which groups
are in a batch is decided between the two, by the first pass alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.errors import AdvantageError
from orchestrator.values.group import GroupKey
from orchestrator.values.rollout import Rollout


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The surviving rollouts of one group."""

    rollouts: list[Rollout]


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """One number per rollout, in the same order."""

    advantages: list[float]


NUMBERS = (int, float, np.integer, np.floating)
"""What a function may return: numpy's float32 is not a `float`, its float64 is."""

AdvantageFunction = Callable[[AdvantageInputs], AdvantageOutputs]
BatchFunction = Callable[[list[float]], list[float]]


@dataclass(frozen=True, slots=True)
class NamedAdvantage:
    """An advantage function and the name that messages use."""

    name: str
    function: AdvantageFunction
    over_batch: BatchFunction | None = None
    """The second pass, if it has one."""
    can_vanish: bool = True
    """Whether a group of zeros teaches nothing; false where zero is not the last word (a second pass, a critic)."""


def compute_advantages(advantage: NamedAdvantage, key: GroupKey, rollouts: Sequence[Rollout]) -> tuple[float, ...]:
    """Call the function for one group and hold it to its contract. Raises `AdvantageError`."""
    where = f"advantage function {advantage.name!r} for env {key.env_name!r}, example {key.example_id!r}"
    try:
        outputs = advantage.function(AdvantageInputs(list(rollouts)))
    except Exception as error:  # a custom function is foreign code: whatever it raises must name the group
        raise AdvantageError(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(outputs, AdvantageOutputs):
        raise AdvantageError(f"{where} must return AdvantageOutputs, got {type(outputs).__name__}")
    try:
        return _checked(where, list(outputs.advantages), len(rollouts))
    except TypeError as error:
        raise AdvantageError(f"{where} returned {outputs.advantages!r}, not a list of numbers") from error


def finish_batch(advantage: NamedAdvantage, env_name: str, advantages: Sequence[float]) -> tuple[float, ...]:
    """The second pass over everything that `env_name` brings to one batch. Raises `AdvantageError`."""
    if advantage.over_batch is None:
        return tuple(advantages)
    where = f"advantage function {advantage.name!r} over the batch for env {env_name!r}"
    return _checked(where, advantage.over_batch(list(advantages)), len(advantages))


def _checked(where: str, advantages: list[float], num_rollouts: int) -> tuple[float, ...]:
    if len(advantages) != num_rollouts:
        raise AdvantageError(f"{where} returned {len(advantages)} numbers for {num_rollouts} rollouts")
    for index, value in enumerate(advantages):
        if not isinstance(value, NUMBERS) or not math.isfinite(value):
            raise AdvantageError(f"{where} returned {value!r} for rollout {index} of {num_rollouts}")
    return tuple(float(value) for value in advantages)
