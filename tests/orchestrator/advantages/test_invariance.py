"""`orchestrator check-advantage`: built-in functions keep every promise; each broken one is found and named."""

import math
import random
from collections.abc import Callable

import pytest

from orchestrator.advantages import AdvantageInputs, AdvantageOutputs, NamedAdvantage, make_advantage
from orchestrator.advantages.invariance import check_advantage
from orchestrator.cli import run
from orchestrator.config.advantage import (
    DrGrpoAdvantageConfig,
    GrpoAdvantageConfig,
    MaxRlAdvantageConfig,
    PpoAdvantageConfig,
    ReinforcePpAdvantageConfig,
    RlooAdvantageConfig,
)
from runtime.errors import UserError

BUILT_IN = (
    GrpoAdvantageConfig(),
    GrpoAdvantageConfig(normalize_std=False),
    DrGrpoAdvantageConfig(),
    RlooAdvantageConfig(),
    MaxRlAdvantageConfig(),
    ReinforcePpAdvantageConfig(),
    PpoAdvantageConfig(),
)


def centred(inputs: AdvantageInputs, *, scale: float = 1.0) -> AdvantageOutputs:
    rewards = [rollout.reward for rollout in inputs.rollouts]
    mean = math.fsum(rewards) / len(rewards)
    return AdvantageOutputs([scale * (reward - mean) if len(rewards) > 1 else 0.0 for reward in rewards])


def divided_by_the_spread(inputs: AdvantageInputs) -> AdvantageOutputs:
    rewards = [rollout.reward for rollout in inputs.rollouts]
    spread = max(rewards) - min(rewards)
    return AdvantageOutputs([float("nan") if spread == 0 else reward / spread for reward in rewards])


def rewarded(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs([rollout.reward for rollout in inputs.rollouts])


def against_the_first(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs([rollout.reward - inputs.rollouts[0].reward for rollout in inputs.rollouts])


def drawn(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs([random.random() if len(inputs.rollouts) > 1 else 0.0 for _ in inputs.rollouts])


def too_few(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs([0.0])


def failing(inputs: AdvantageInputs) -> AdvantageOutputs:
    raise KeyError("no such metric")


BROKEN: dict[Callable[[AdvantageInputs], AdvantageOutputs], str] = {
    divided_by_the_spread: "finite",
    rewarded: "singleton",
    against_the_first: "order",
    drawn: "pure",
    too_few: "finite",
    failing: "finite",
}


@pytest.mark.parametrize("config", BUILT_IN, ids=lambda config: config.type)
def test_built_in_functions_keep_every_promise(config) -> None:  # type: ignore[no-untyped-def]
    assert not [check for check in check_advantage(make_advantage(config)) if not check.passed]


@pytest.mark.parametrize("function", BROKEN, ids=lambda function: function.__name__)
def test_a_broken_promise_is_named(function: Callable[[AdvantageInputs], AdvantageOutputs]) -> None:
    checks = check_advantage(NamedAdvantage("broken", function))
    assert BROKEN[function] in [check.name.partition(":")[0] for check in checks if not check.passed]


def test_the_command_prints_a_table_and_its_exit_code_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check-advantage", f"{__name__}:centred", "--kwargs", '{"scale": 2.0}']) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(":centred: 9 of 9 checks passed")
    assert run(["check-advantage", f"{__name__}:against_the_first"]) == 1
    assert "FAIL  order: rollouts shuffled" in capsys.readouterr().out


def test_a_function_that_is_not_found_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="no_such_function"):
        run(["check-advantage", f"{__name__}:no_such_function"])
