"""Advantages: one finite number per rollout of one group, zero where nothing differs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.advantages import (
    AdvantageInputs,
    AdvantageOutputs,
    NamedAdvantage,
    compute_advantages,
    grpo,
    make_advantage,
)
from orchestrator.config import GrpoAdvantageConfig
from orchestrator.errors import AdvantageError
from orchestrator.groups import GroupKey
from tests.orchestrator.core.builders import make_rollout

REWARDS = st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=16)
KEY = GroupKey("copy", "example-3", 0)


def advantages_of(rewards: list[float], *, normalize_std: bool = True) -> list[float]:
    return grpo(AdvantageInputs([make_rollout(reward) for reward in rewards]), normalize_std=normalize_std).advantages


@given(REWARDS, st.booleans())
def test_advantages_are_finite_centred_and_one_per_rollout(rewards: list[float], normalize: bool) -> None:
    advantages = advantages_of(rewards, normalize_std=normalize)
    assert len(advantages) == len(rewards)
    assert all(math.isfinite(value) for value in advantages)
    scale = max(map(abs, advantages), default=0.0)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-9 * max(1.0, max(map(abs, rewards)), scale))


@given(REWARDS, st.randoms(use_true_random=False))
def test_advantages_follow_their_rollout_whatever_the_order(rewards: list[float], random: "object") -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = advantages_of([rewards[index] for index in order])
    assert shuffled == [advantages_of(rewards)[index] for index in order]


@given(st.floats(-1e6, 1e6), st.integers(1, 30), st.booleans())
def test_constant_rewards_have_exactly_no_advantage(reward: float, size: int, normalize: bool) -> None:
    assert advantages_of([reward] * size, normalize_std=normalize) == [0.0] * size


@given(REWARDS)
def test_a_higher_reward_never_has_a_lower_advantage(rewards: list[float]) -> None:
    pairs = sorted(zip(rewards, advantages_of(rewards), strict=True))
    assert [advantage for _, advantage in pairs] == sorted(advantage for _, advantage in pairs)


def test_grpo_on_numbers_computed_by_hand() -> None:
    assert advantages_of([0.0, 1.0, 1.0, 2.0], normalize_std=False) == [-1.0, 0.0, 0.0, 1.0]
    assert advantages_of([0.0, 1.0, 1.0, 2.0]) == pytest.approx([-math.sqrt(2), 0, 0, math.sqrt(2)], rel=1e-5)


def test_the_config_chooses_normalisation() -> None:
    rollouts = [make_rollout(0.0), make_rollout(4.0)]
    plain = compute_advantages(make_advantage(GrpoAdvantageConfig(normalize_std=False)), KEY, rollouts)
    normal = compute_advantages(make_advantage(GrpoAdvantageConfig()), KEY, rollouts)
    assert plain == (-2.0, 2.0)
    assert normal == pytest.approx((-1.0, 1.0), rel=1e-5)


@pytest.mark.parametrize("bad", [[0.0], [0.0, 1.0, 2.0], [0.0, math.nan], [math.inf, 0.0]])
def test_a_broken_function_is_named_with_env_and_example(bad: list[float]) -> None:
    broken = NamedAdvantage("mine", lambda _: AdvantageOutputs(bad))
    with pytest.raises(AdvantageError, match=r"'mine'.*'copy'.*'example-3'"):
        compute_advantages(broken, KEY, [make_rollout(), make_rollout()])
