"""Advantages of one group. The function is called once per group, with any size >= 1.

Contract: one finite number per rollout, in the order of the rollouts. A group that does not differ gets exact zeros.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from orchestrator.config import AdvantageConfig
from orchestrator.errors import AdvantageError
from orchestrator.groups import GroupKey
from orchestrator.rollout import Rollout

_EPSILON = 1e-6
"""Keeps the quotient finite; far below any reward spread that means something."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The surviving rollouts of one group."""

    rollouts: list[Rollout]


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """One number per rollout, in the same order."""

    advantages: list[float]


AdvantageFunction = Callable[[AdvantageInputs], AdvantageOutputs]


@dataclass(frozen=True, slots=True)
class NamedAdvantage:
    """An advantage function and the name that messages use."""

    name: str
    function: AdvantageFunction


def grpo(inputs: AdvantageInputs, *, normalize_std: bool) -> AdvantageOutputs:
    """Reward minus the group's mean, optionally divided by the group's (population) standard deviation."""
    rewards = [rollout.reward for rollout in inputs.rollouts]
    if min(rewards) == max(rewards):
        # Exact zeros: the rounding error of the mean, divided by a deviation of the same size, would look like signal.
        return AdvantageOutputs([0.0] * len(rewards))
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return AdvantageOutputs(centred)
    std = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return AdvantageOutputs([value / (std + _EPSILON) for value in centred])


def make_advantage(config: AdvantageConfig) -> NamedAdvantage:
    """The function that the config asks for."""
    return NamedAdvantage(config.type, partial(grpo, normalize_std=config.normalize_std))


def compute_advantages(advantage: NamedAdvantage, key: GroupKey, rollouts: Sequence[Rollout]) -> tuple[float, ...]:
    """Call the function for one group and hold it to its contract. Raises `AdvantageError`."""
    advantages = advantage.function(AdvantageInputs(list(rollouts))).advantages
    where = f"advantage function {advantage.name!r} for env {key.env_name!r}, example {key.example_id!r}"
    if len(advantages) != len(rollouts):
        raise AdvantageError(f"{where} returned {len(advantages)} numbers for {len(rollouts)} rollouts")
    for index, value in enumerate(advantages):
        if not math.isfinite(value):
            raise AdvantageError(f"{where} returned {value} for rollout {index} of {len(rollouts)}")
    return tuple(float(value) for value in advantages)
