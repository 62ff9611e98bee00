"""The contract of advantage functions. `functions.py` calls them and holds them to it.

First pass, when a group is final: the function is called once with one group of any size >= 1 and gives one finite
number per rollout, in their order. Second pass, when the batch is cut, only for functions that normalise over the
batch: it sees what the first pass gave to all rollouts of one environment in the batch, in dispatch order. Which groups
are in a batch is decided between the two, by the first pass alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.values.rollout import Rollout


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The surviving rollouts of one group."""

    rollouts: list[Rollout]


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """One number per rollout, in the same order."""

    advantages: list[float]


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
