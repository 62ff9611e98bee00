"""Advantages of rollouts: the contract, the built-in functions, and `custom` ones by import path."""

from orchestrator.advantages.contract import (
    AdvantageFunction,
    AdvantageInputs,
    AdvantageOutputs,
    NamedAdvantage,
)
from orchestrator.advantages.functions import compute_advantages, finish_batch, make_advantage

__all__ = [
    "AdvantageFunction",
    "AdvantageInputs",
    "AdvantageOutputs",
    "NamedAdvantage",
    "compute_advantages",
    "finish_batch",
    "make_advantage",
]
