"""How much each example should be visited: the contract of weight functions, and the built-in one."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from orchestrator.curriculum.config import CustomCurriculumConfig, DifficultyCurriculumConfig
from orchestrator.errors import CurriculumError
from runtime.errors import UserError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExampleStats:
    """What is known of all examples of one environment, by index. Copies: a function may do with them as it likes."""

    num_visits: npt.NDArray[np.int64]
    """Groups that were drawn for the example, also if their outcome is not known yet or they were lost."""
    num_rollouts: Floats
    """Rollouts whose reward is known, those of earlier visits discounted by `memory`."""
    mean_reward: Floats
    """Their mean reward, discounted alike; NaN where there are none."""


WeightFunction = Callable[[ExampleStats], Floats]


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """A weight function and the name that messages use."""

    name: str
    function: WeightFunction

    def __call__(self, env_name: str, stats: ExampleStats) -> Floats:
        """One weight >= 0 per example, not all 0. Raises `CurriculumError` if the function breaks its contract."""
        where = f"curriculum {self.name!r} of env {env_name!r}"
        try:
            weights = np.asarray(self.function(stats), dtype=np.float64)
        except Exception as error:  # a custom function is foreign code: whatever it raises must name itself
            raise CurriculumError(f"{where} raised {type(error).__name__}: {error}") from error
        if weights.shape != stats.num_visits.shape:
            raise CurriculumError(f"{where} returned shape {weights.shape} for {len(stats.num_visits)} examples")
        if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
            raise CurriculumError(f"{where} returned weights that are not all finite and >= 0, or that are all 0")
        return weights


def difficulty(stats: ExampleStats, *, target: float, spread: float, floor: float) -> Floats:
    """1 for examples never visited, falling from 1 at `target` to `floor` at `spread` from it for those that were.

    Visited examples of which nothing is known yet (they run, or all their rollouts failed) have `floor`.
    """
    weights = np.where(stats.num_visits > 0, floor, 1.0)
    known = stats.num_rollouts > 0
    distance = np.abs(stats.mean_reward[known] - target) / spread
    weights[known] = np.maximum(floor, 1.0 - distance)
    return weights


def make_weights(config: DifficultyCurriculumConfig | CustomCurriculumConfig) -> NamedWeights:
    """The function that the config asks for. Raises `UserError` for a `custom` one that cannot be called."""
    if isinstance(config, CustomCurriculumConfig):
        return _load_custom(config)
    return NamedWeights(
        "difficulty", partial(difficulty, target=config.target, spread=config.spread, floor=config.floor)
    )


def _load_custom(config: CustomCurriculumConfig) -> NamedWeights:
    what = f"curriculum.import_path = {config.import_path!r}"
    module_name, _, name = config.import_path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
        inspect.signature(function).bind(None, **config.kwargs)
    except ImportError as error:
        raise UserError(f"{what}: {error} (is its folder on PYTHONPATH?)") from error
    except (AttributeError, TypeError) as error:
        raise UserError(f"{what} cannot be called with curriculum.kwargs {config.kwargs}: {error}") from error
    return NamedWeights(config.import_path, partial(function, **config.kwargs))
