"""Advantages: one finite number per rollout of one group, zero where nothing differs, whatever the size and order.

`orchestrator check-advantage`: built-in functions keep every promise; each broken one is found and named.

Advantage functions of a user, found by import path.
"""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from orchestrator.advantages import (
    AdvantageInputs,
    AdvantageOutputs,
    NamedAdvantage,
    compute_advantages,
    finish_batch,
    make_advantage,
)
from orchestrator.advantages.functions import normalised
from orchestrator.advantages.invariance import check_advantage
from orchestrator.cli import run
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
from runtime.errors import UserError
from tests.orchestrator.builders import make_rollout

NOT_A_FUNCTION = 3


def ranks(inputs: AdvantageInputs, *, scale: float = 1.0) -> AdvantageOutputs:
    """How many of the group are worse."""
    rewards = [rollout.reward for rollout in inputs.rollouts]
    return AdvantageOutputs([scale * sum(other < reward for other in rewards) for reward in rewards])


def raises(inputs: AdvantageInputs) -> AdvantageOutputs:
    """A bug of the user's."""
    raise KeyError("judge")


def returns_a_list(inputs: AdvantageInputs) -> list[float]:
    """Forgets to wrap its result."""
    return [0.0] * len(inputs.rollouts)


REWARDS = st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=16)

KEY = GroupKey("copy", "example-3", 0)

WITH_BASELINE: list[AdvantageConfig] = [
    GrpoAdvantageConfig(),
    GrpoAdvantageConfig(normalize_std=False),
    DrGrpoAdvantageConfig(),
    RlooAdvantageConfig(),
    MaxRlAdvantageConfig(),
    ReinforcePpAdvantageConfig(),
]

WITHOUT_BASELINE: list[AdvantageConfig] = [PpoAdvantageConfig(), ReinforcePpAdvantageConfig(group_baseline=False)]

CUSTOM = "tests.orchestrator.advantages.test_functions"

any_function = st.sampled_from([make_advantage(config) for config in WITH_BASELINE + WITHOUT_BASELINE])

function_with_baseline = st.sampled_from([make_advantage(config) for config in WITH_BASELINE])


def advantages_of(config: AdvantageConfig, *rewards: float) -> tuple[float, ...]:
    return compute(make_advantage(config), list(rewards))


def compute(advantage: NamedAdvantage, rewards: list[float]) -> tuple[float, ...]:
    return compute_advantages(advantage, KEY, [make_rollout(reward) for reward in rewards])


@given(any_function, REWARDS)
def test_there_is_one_finite_number_per_rollout(advantage: NamedAdvantage, rewards: list[float]) -> None:
    advantages = compute(advantage, rewards)
    assert len(advantages) == len(rewards)
    assert all(math.isfinite(value) for value in advantages)


@given(any_function, REWARDS, st.randoms(use_true_random=False))
def test_an_advantage_follows_its_rollout_whatever_the_order(
    advantage: NamedAdvantage, rewards: list[float], rng: random.Random
) -> None:
    order = list(range(len(rewards)))
    rng.shuffle(order)
    straight = compute(advantage, rewards)
    assert compute(advantage, [rewards[index] for index in order]) == tuple(straight[index] for index in order)


@given(any_function, REWARDS)
def test_a_higher_reward_never_has_a_lower_advantage(advantage: NamedAdvantage, rewards: list[float]) -> None:
    pairs = sorted(zip(rewards, compute(advantage, rewards), strict=True))
    assert [value for _, value in pairs] == sorted(value for _, value in pairs)


@given(function_with_baseline, st.floats(-1e6, 1e6), st.integers(1, 30))
def test_constant_rewards_have_exactly_no_advantage(advantage: NamedAdvantage, reward: float, size: int) -> None:
    assert compute(advantage, [reward] * size) == (0.0,) * size


@given(function_with_baseline, REWARDS)
def test_a_baseline_centres_the_group(advantage: NamedAdvantage, rewards: list[float]) -> None:
    advantages = compute(advantage, rewards)
    scale = max(1.0, *map(abs, rewards), *map(abs, advantages))
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-9 * scale * max(1.0, max(map(abs, rewards))))


@given(function_with_baseline, st.floats(-1e6, 1e6))
def test_a_group_of_one_has_no_advantage(advantage: NamedAdvantage, reward: float) -> None:
    assert compute(advantage, [reward]) == (0.0,)


@given(any_function, REWARDS, st.data())
def test_the_survivors_of_a_group_are_a_group(
    advantage: NamedAdvantage, rewards: list[float], data: st.DataObject
) -> None:
    kept = data.draw(st.lists(st.sampled_from(range(len(rewards))), min_size=1, unique=True))
    survivors = [make_rollout(rewards[index]) for index in sorted(kept)]
    assert compute_advantages(advantage, KEY, survivors) == compute(advantage, [r.reward for r in survivors])


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12))
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(rewards: list[float]) -> None:
    for index, value in enumerate(advantages_of(RlooAdvantageConfig(), *rewards)):
        others = rewards[:index] + rewards[index + 1 :]
        assert value == pytest.approx(rewards[index] - math.fsum(others) / len(others), abs=1e-9)


def test_the_functions_on_numbers_computed_by_hand() -> None:
    rewards = (0.0, 1.0, 1.0, 2.0)
    assert advantages_of(GrpoAdvantageConfig(), *rewards) == pytest.approx(
        [-math.sqrt(2), 0, 0, math.sqrt(2)], rel=1e-5
    )
    assert advantages_of(GrpoAdvantageConfig(normalize_std=False), *rewards) == (-1.0, 0.0, 0.0, 1.0)
    assert advantages_of(DrGrpoAdvantageConfig(), *rewards) == (-1.0, 0.0, 0.0, 1.0)
    assert advantages_of(RlooAdvantageConfig(), *rewards) == pytest.approx([-4 / 3, 0, 0, 4 / 3])
    assert advantages_of(MaxRlAdvantageConfig(), 0.0, 0.0, 0.0, 1.0) == pytest.approx([-1, -1, -1, 3])
    assert advantages_of(ReinforcePpAdvantageConfig(), *rewards) == (-1.0, 0.0, 0.0, 1.0)
    assert advantages_of(ReinforcePpAdvantageConfig(group_baseline=False), *rewards) == rewards
    assert advantages_of(PpoAdvantageConfig(), *rewards) == rewards


def test_maxrl_never_punishes_the_better_rollout_of_a_losing_group() -> None:
    worse, better = advantages_of(MaxRlAdvantageConfig(), -3.0, -1.0)
    assert worse < 0 < better


@given(st.lists(st.floats(-1e6, 1e6), max_size=40))
def test_the_second_pass_gives_the_batch_mean_0_and_deviation_1(values: list[float]) -> None:
    result = normalised(values)
    assert len(result) == len(values)
    if values and max(values) - min(values) > 1e-3:
        assert math.fsum(result) / len(result) == pytest.approx(0, abs=1e-6)
        assert math.fsum(value * value for value in result) / len(result) == pytest.approx(1, rel=1e-2)
    if values and min(values) == max(values):
        assert result == [0.0] * len(values)


def test_only_functions_that_normalise_over_the_batch_have_a_second_pass() -> None:
    grpo, plus_plus = make_advantage(GrpoAdvantageConfig()), make_advantage(ReinforcePpAdvantageConfig())
    assert finish_batch(grpo, "copy", [1.0, 3.0]) == (1.0, 3.0)
    assert finish_batch(plus_plus, "copy", [1.0, 3.0]) == pytest.approx((-1.0, 1.0), rel=1e-5)


def test_a_second_pass_is_held_to_the_contract_too() -> None:
    broken = NamedAdvantage("mine", lambda _: AdvantageOutputs([]), over_batch=lambda values: values[1:])
    with pytest.raises(AdvantageError, match=r"'mine' over the batch for env 'copy' returned 1 numbers for 2"):
        finish_batch(broken, "copy", [0.0, 1.0])


@pytest.mark.parametrize("bad", [[0.0], [0.0, 1.0, 2.0], [0.0, math.nan], [math.inf, 0.0], [None, 1.0]])
def test_a_broken_function_is_named_with_env_and_example(bad: list[float]) -> None:
    broken = NamedAdvantage("mine", lambda _: AdvantageOutputs(bad))
    with pytest.raises(AdvantageError, match=r"'mine'.*'copy'.*'example-3'"):
        compute(broken, [1.0, 1.0])


@pytest.mark.parametrize("config", WITH_BASELINE + WITHOUT_BASELINE)
def test_rewards_that_overflow_are_an_error_and_never_an_advantage(config: AdvantageConfig) -> None:
    for rewards in ([math.nan, 1.0], [math.inf, 1.0]):
        with pytest.raises(AdvantageError, match=config.type):
            compute(make_advantage(config), rewards)


def test_a_custom_function_is_found_by_its_path_and_gets_its_arguments() -> None:
    config = CustomAdvantageConfig(import_path=f"{CUSTOM}:ranks", kwargs={"scale": 2.0})
    assert advantages_of(config, 0.5, 0.0, 1.0) == (2.0, 0.0, 4.0)


@pytest.mark.parametrize(
    ("import_path", "kwargs", "said"),
    [
        ("no.such.module:f", {}, "PYTHONPATH"),
        (f"{CUSTOM}:missing", {}, "missing"),
        (f"{CUSTOM}:NOT_A_FUNCTION", {}, "is a int, not a function"),
        (f"{CUSTOM}:ranks", {"scales": 1}, "scales"),
    ],
)
def test_a_custom_function_that_cannot_be_called_is_a_users_mistake(
    import_path: str, kwargs: dict[str, int], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        make_advantage(CustomAdvantageConfig(import_path=import_path, kwargs=dict(kwargs)))


@pytest.mark.parametrize(("name", "said"), [("raises", "raised KeyError: 'judge'"), ("returns_a_list", "got list")])
def test_a_custom_function_that_misbehaves_is_named(name: str, said: str) -> None:
    with pytest.raises(AdvantageError, match=rf"{CUSTOM}:{name}.*'copy'.*'example-3'.*{said}"):
        advantages_of(CustomAdvantageConfig(import_path=f"{CUSTOM}:{name}"), 0.0, 1.0)


def test_every_name_makes_its_function() -> None:
    adapter: TypeAdapter[AdvantageConfig] = TypeAdapter(AdvantageConfig)
    for name in ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "ppo"):
        advantage = make_advantage(adapter.validate_python({"type": name}))
        assert advantage.name == name
        assert isinstance(advantage.function(AdvantageInputs([make_rollout()])), AdvantageOutputs)


def test_numbers_of_numpy_are_numbers() -> None:
    advantage = NamedAdvantage("mine", lambda inputs: AdvantageOutputs(np.array([0.5, -0.5], np.float32)))  # type: ignore[arg-type]
    assert compute_advantages(advantage, KEY, [make_rollout(1.0), make_rollout(0.0)]) == (0.5, -0.5)


@pytest.mark.parametrize("value", [None, 3.0, ["1.0"], [None], [1j]], ids=repr)
def test_what_is_no_list_of_numbers_is_an_error_that_names_the_function(value: object) -> None:
    advantage = NamedAdvantage("mine", lambda inputs: AdvantageOutputs(value))  # type: ignore[arg-type]
    with pytest.raises(AdvantageError, match=r"'mine' for env 'copy', example 'example-3' returned"):
        compute_advantages(advantage, KEY, [make_rollout(1.0)])


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
