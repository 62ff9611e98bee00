"""Generalised advantage estimation over episodes of any length.

delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1},    V and A are 0 after the last action
"""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


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
