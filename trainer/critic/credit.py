"""`assign_credit`: from the values of a whole batch to the advantage of every token and the target of every value.

The samples of a trajectory, in the order of `step_index`, are one episode, whatever ranks and micro batches they are
in. Its reward comes with its last action. A **step** is a run of `rl` tokens without a gap: a turn of the policy. So a
trajectory has the same steps whether its turns are one sample or several.

delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1},    V and A are 0 after the last action
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.arrays import FloatArray, IntArray
from trainer.config.model import CriticConfig

NO_ACTION, ACTION, STEP_START = 0, 1, 2
"""Roles of a token: not an `rl` token (or cut off); one of a step; the first one of a step."""
_EPSILON = 1e-8


@dataclass(frozen=True)
class CreditInputs:
    """A batch as its critic sees it: R rows of the manifest, N loss tokens, row by row, in order."""

    trajectories: IntArray
    """[R]."""
    step_indices: IntArray
    """[R]."""
    rewards: FloatArray
    """[R]: equal for the rows of a trajectory."""
    token_rows: IntArray
    """[N]: row of each token."""
    values: FloatArray
    """[N]: of the state before the token; of no meaning without a role."""
    roles: npt.NDArray[np.int8]
    """[N]."""


@dataclass(frozen=True)
class Credit:
    """One entry per loss token of the batch."""

    advantages: FloatArray
    """0 for tokens without a role."""
    returns: FloatArray
    """What the value should have been; 0 where `is_target` is false."""
    is_target: npt.NDArray[np.bool_]
    """Whether the token's value is trained: that of every action, or of the first token of every step."""


def assign_credit(batch: CreditInputs, config: CriticConfig) -> Credit:
    """Advantages and returns by GAE, over tokens or steps."""
    actions = _in_order_of_time(batch)
    starts = batch.roles[actions] == STEP_START if config.level == "step" else np.ones(len(actions), dtype=np.bool_)
    decisions = actions[starts]
    _, lengths = np.unique(batch.trajectories[batch.token_rows[decisions]], return_counts=True)
    rewards = np.zeros(len(decisions))
    last = np.cumsum(lengths) - 1
    rewards[last] = batch.rewards[batch.token_rows[decisions[last]]]
    by_decision = generalized_advantages(batch.values[decisions], rewards, lengths, config.gamma, config.lam)
    by_action = by_decision[np.cumsum(starts) - 1]
    advantages, returns = np.zeros_like(batch.values), np.zeros_like(batch.values)
    advantages[actions] = _normalized(by_action) if config.normalize_advantages else by_action
    returns[decisions] = by_decision + batch.values[decisions]
    is_target = np.zeros(len(batch.values), dtype=np.bool_)
    is_target[decisions] = True
    return Credit(advantages, returns, is_target)


def _in_order_of_time(batch: CreditInputs) -> IntArray:
    """Tokens with a role: trajectories one after the other, each by `step_index`, each sample in its order."""
    rows = np.lexsort((batch.step_indices, batch.trajectories))
    place_of_row = np.empty_like(rows)
    place_of_row[rows] = np.arange(len(rows))
    tokens = np.argsort(place_of_row[batch.token_rows], kind="stable")
    actions: IntArray = tokens[batch.roles[tokens] != NO_ACTION]
    return actions


def _normalized(advantages: FloatArray) -> FloatArray:
    normalized: FloatArray = (advantages - advantages.mean()) / (advantages.std() + _EPSILON)
    return normalized


def generalized_advantages(
    values: FloatArray, rewards: FloatArray, lengths: IntArray, gamma: float, lam: float
) -> FloatArray:
    """Advantage of each action. Episodes of `lengths` actions (at least 1 each) lie end to end.

    Walks back from the ends of all episodes at once: as many array operations as the longest episode has actions.
    """
    ends = np.cumsum(lengths)
    next_values = np.append(values[1:], 0.0)
    next_values[ends - 1] = 0.0
    deltas = rewards + gamma * next_values - values
    longest_first = np.argsort(-lengths, kind="stable")
    last = ends[longest_first] - 1
    longest = int(lengths.max(initial=0))
    num_alive = len(lengths) - np.searchsorted(np.sort(lengths), np.arange(longest), side="right")
    advantages = np.zeros_like(deltas)
    carried = np.zeros(len(lengths))
    for back, alive in enumerate(num_alive.tolist()):
        places = last[:alive] - back
        carried[:alive] = deltas[places] + gamma * lam * carried[:alive]
        advantages[places] = carried[:alive]
    return advantages
