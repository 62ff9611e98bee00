"""The built-in advantage functions, and the one place that calls one, built-in or custom.

All accept any size >= 1 and are indifferent to the order of the rollouts.

A group whose rewards are all equal, a group of one included, gets exact zeros from every function with a baseline.
"""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from orchestrator.advantages.contract import AdvantageInputs, AdvantageOutputs, NamedAdvantage
from orchestrator.config.advantage import (
    AdvantageConfig,
    CustomAdvantageConfig,
    DrGrpoAdvantageConfig,
    GrpoAdvantageConfig,
    MaxRlAdvantageConfig,
    PpoAdvantageConfig,
    ReinforcePpAdvantageConfig,
    RlooAdvantageConfig,
)
from orchestrator.errors import AdvantageError
from orchestrator.values.group import GroupKey
from orchestrator.values.rollout import Rollout
from runtime.base.imported import load_function

_EPSILON = 1e-6
"""Keeps quotients finite; far below any reward spread that means something."""


NUMBERS = (int, float, np.integer, np.floating)
"""What a function may return: numpy's float32 is not a `float`, its float64 is."""


def grpo(inputs: AdvantageInputs, *, normalize_std: bool) -> AdvantageOutputs:
    """Reward minus the group's mean, optionally divided by the group's (population) standard deviation."""
    centred = _centred(_rewards(inputs))
    return AdvantageOutputs(_over_deviation(centred) if normalize_std else centred)


def dr_grpo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Reward minus the group's mean: no division, so that easy and hard examples are not weighted up."""
    return AdvantageOutputs(_centred(_rewards(inputs)))


def rloo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Reward minus the mean of the others, which does not depend on the rollout itself: an unbiased baseline."""
    rewards = _rewards(inputs)
    scale = len(rewards) / max(1, len(rewards) - 1)  # r - mean of others = n / (n - 1) * (r - mean)
    return AdvantageOutputs([scale * value for value in _centred(rewards)])


def maxrl(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Reward minus the group's mean, divided by that mean. Meant for rewards in [0, 1]: dividing the gradient of the
    success rate by the success rate gives that of its logarithm. The size of the mean counts, not its sign, so that a
    higher reward is never punished."""
    rewards = _rewards(inputs)
    mean = abs(math.fsum(rewards) / len(rewards))
    return AdvantageOutputs([value / max(mean, _EPSILON) for value in _centred(rewards)])


def as_rewarded(inputs: AdvantageInputs) -> AdvantageOutputs:
    """The reward itself: who comes later (the batch's mean, a critic) has the baseline."""
    return AdvantageOutputs(_rewards(inputs))


def normalised(values: list[float]) -> list[float]:
    """`values` minus their mean, divided by their (population) standard deviation; zeros if they are all equal."""
    return _over_deviation(_centred(values)) if values else []


def _rewards(inputs: AdvantageInputs) -> list[float]:
    return [rollout.reward for rollout in inputs.rollouts]


def _centred(values: Sequence[float]) -> list[float]:
    if min(values) == max(values):
        # Exact zeros: the rounding error of the mean, divided by a deviation of the same size, would look like signal.
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def _over_deviation(centred: list[float]) -> list[float]:
    deviation = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return [value / (deviation + _EPSILON) for value in centred]


def make_advantage(config: AdvantageConfig) -> NamedAdvantage:
    """The function that the config asks for. Raises `UserError` for a `custom` one that cannot be called."""
    match config:
        case GrpoAdvantageConfig():
            return NamedAdvantage("grpo", partial(grpo, normalize_std=config.normalize_std))
        case DrGrpoAdvantageConfig():
            return NamedAdvantage("dr_grpo", dr_grpo)
        case RlooAdvantageConfig():
            return NamedAdvantage("rloo", rloo)
        case MaxRlAdvantageConfig():
            return NamedAdvantage("maxrl", maxrl)
        case ReinforcePpAdvantageConfig():
            first = dr_grpo if config.group_baseline else as_rewarded
            return NamedAdvantage("reinforce_pp", first, normalised, can_vanish=config.group_baseline)
        case PpoAdvantageConfig():
            return NamedAdvantage("ppo", as_rewarded, can_vanish=False)
        case CustomAdvantageConfig():
            function = load_function(config.import_path, config.kwargs, section="advantage")
            return NamedAdvantage(config.import_path, partial(function, **config.kwargs))


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
