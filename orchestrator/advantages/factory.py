"""From the config to the advantage function."""

import importlib
import inspect
from functools import partial

from orchestrator.advantages.config import (
    AdvantageConfig,
    CustomAdvantageConfig,
    DrGrpoAdvantageConfig,
    GrpoAdvantageConfig,
    MaxRlAdvantageConfig,
    PpoAdvantageConfig,
    ReinforcePpAdvantageConfig,
    RlooAdvantageConfig,
)
from orchestrator.advantages.contract import NamedAdvantage
from orchestrator.advantages.functions import as_rewarded, dr_grpo, grpo, maxrl, normalised, rloo
from runtime.errors import UserError


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
            return load_custom(config)


def load_custom(config: CustomAdvantageConfig) -> NamedAdvantage:
    """The function at `package.module:name`, with its arguments. Raises `UserError`, which says what is wrong."""
    what = f"advantage.import_path = {config.import_path!r}"
    module_name, _, name = config.import_path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise UserError(f"{what}: {error} (is its folder on PYTHONPATH?)") from error
    except AttributeError as error:
        raise UserError(f"{what}: {error}") from error
    if not callable(function):
        raise UserError(f"{what} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(None, **config.kwargs)
    except TypeError as error:
        raise UserError(f"{what} cannot be called with advantage.kwargs {config.kwargs}: {error}") from error
    return NamedAdvantage(config.import_path, partial(function, **config.kwargs))
