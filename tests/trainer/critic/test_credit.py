"""Advantages and value targets, as pure functions of values and rewards."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.model import CriticConfig
from trainer.critic.credit import ACTION, NO_ACTION, STEP_START, CreditInputs, assign_credit, generalized_advantages
from trainer.critic.step import value_losses
from trainer.critic.values import explained_variance

S, A, N = STEP_START, ACTION, NO_ACTION


def plain_gae(values: list[float], rewards: list[float], gamma: float, lam: float) -> list[float]:
    advantages = [0.0] * len(values)
    carried, next_value = 0.0, 0.0
    for place in reversed(range(len(values))):
        carried = rewards[place] + gamma * next_value - values[place] + gamma * lam * carried
        advantages[place], next_value = carried, values[place]
    return advantages


@settings(max_examples=50, deadline=None)
@given(
    episodes=st.lists(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=9), max_size=6),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_gae_of_many_episodes_is_that_of_each(
    episodes: list[list[tuple[float, float]]], gamma: float, lam: float
) -> None:
    flat = np.array([action for episode in episodes for action in episode]).reshape(-1, 2)
    lengths = np.array([len(episode) for episode in episodes], dtype=np.int64)
    expected = [
        advantage
        for episode in episodes
        for advantage in plain_gae([v for v, _ in episode], [r for _, r in episode], gamma, lam)
    ]
    found = generalized_advantages(flat[:, 0], flat[:, 1], lengths, gamma, lam)
    np.testing.assert_allclose(found, expected, atol=1e-9)


def batch(roles: list[list[int]], values: list[list[float]], trajectories: list[int], steps: list[int]) -> CreditInputs:
    return CreditInputs(
        trajectories=np.array(trajectories),
        step_indices=np.array(steps),
        rewards=np.array([float(10 * trajectory + 1) for trajectory in trajectories]),
        token_rows=np.repeat(np.arange(len(roles)), [len(row) for row in roles]),
        values=np.array([value for row in values for value in row]),
        roles=np.array([role for row in roles for role in row], dtype=np.int8),
    )


def config(level: str, gamma: float = 1.0, lam: float = 1.0, normalize: bool = False) -> CriticConfig:
    return CriticConfig(level=level, gamma=gamma, lam=lam, normalize_advantages=normalize)  # type: ignore[arg-type]


def test_a_trajectory_of_several_samples_is_one_episode_in_the_order_of_its_steps() -> None:
    # Rows in any order: trajectory 0 is rows 2 (step 0) and 0 (step 1).
    found = assign_credit(
        batch([[S, A], [S], [S]], [[0.5, 0.25], [3.0], [0.75]], [0, 1, 0], [1, 0, 0]), config("token", lam=0.0)
    )
    # One-step deltas: row 2 looks at row 0, whose last token gets the reward of 1.
    np.testing.assert_allclose(found.advantages, [0.25 - 0.5, 1 - 0.25, 11 - 3.0, 0.5 - 0.75])
    np.testing.assert_allclose(found.returns, [0.25, 1.0, 11.0, 0.5])
    assert found.is_target.all()


def test_all_tokens_of_a_step_share_its_advantage_and_its_first_value_is_trained() -> None:
    found = assign_credit(
        batch([[S, A, A, S, A], [S, A]], [[0.5, 9, 9, 0.25, 9], [0.125, 9]], [0, 0], [0, 1]),
        config("step", gamma=0.5, lam=0.0),
    )
    first, second, third = 0.5 * 0.25 - 0.5, 0.5 * 0.125 - 0.25, 1 - 0.125
    np.testing.assert_allclose(found.advantages, [first] * 3 + [second] * 2 + [third] * 2)
    assert found.is_target.tolist() == [True, False, False, True, False, True, False]
    np.testing.assert_allclose(found.returns[found.is_target], [0.125, 0.0625, 1.0])


def test_steps_do_not_depend_on_how_a_trajectory_is_cut_into_samples() -> None:
    values = [0.5, 9.0, 0.25, 9.0]
    one = assign_credit(batch([[S, A, S, A]], [values], [0], [0]), config("step", 0.9, 0.8))
    two = assign_credit(batch([[S, A], [S, A]], [values[:2], values[2:]], [0, 0], [0, 1]), config("step", 0.9, 0.8))
    np.testing.assert_array_equal(one.advantages, two.advantages)
    np.testing.assert_array_equal(one.returns, two.returns)


@pytest.mark.parametrize("level", ["token", "step"])
def test_tokens_without_a_role_are_no_actions(level: str) -> None:
    found = assign_credit(batch([[N, S, A, N], [N]], [[7, 0.5, 0.25, 7], [7]], [0, 1], [0, 0]), config(level))
    assert found.advantages[[0, 3, 4]].tolist() == [0, 0, 0]
    assert not found.is_target[[0, 3, 4]].any()
    assert found.advantages[1] == pytest.approx(1 - 0.5)


def test_normalised_advantages_have_mean_0_and_deviation_1_over_actions() -> None:
    values = [[0.5, 0.3, 7.0], [0.1, 0.2]]
    found = assign_credit(batch([[S, A, N], [S, A]], values, [0, 1], [0, 0]), config("token", normalize=True))
    actions = found.advantages[[0, 1, 3, 4]]
    assert actions.mean() == pytest.approx(0, abs=1e-9)
    assert actions.std() == pytest.approx(1, abs=1e-6)
    plain = assign_credit(batch([[S, A, N], [S, A]], values, [0, 1], [0, 0]), config("token"))
    np.testing.assert_array_equal(found.returns, plain.returns)


def test_a_value_beyond_the_limit_has_no_gradient_towards_its_return_but_one_back() -> None:
    values = torch.tensor([0.1, 0.5, -0.5], requires_grad=True)
    losses, is_clipped = value_losses(values, torch.zeros(3), torch.tensor([1.0, 1.0, 1.0]), 0.2)
    losses.sum().backward()
    assert is_clipped.tolist() == [False, True, False]
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([-0.9, 0.0, -1.5]))
    torch.testing.assert_close(losses, torch.tensor([0.405, 0.32, 1.125]))


def test_without_a_limit_the_loss_is_half_the_squared_distance() -> None:
    losses, is_clipped = value_losses(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0]), None)
    assert losses.tolist() == [2.0]
    assert is_clipped.tolist() == [False]


def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_a_constant_one() -> None:
    returns = np.array([0.0, 1.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.ones(3), returns) == pytest.approx(0.0)
    assert explained_variance(returns, np.ones(3)) is None
