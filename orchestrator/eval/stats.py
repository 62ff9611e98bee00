"""What a set of evaluation rollouts says, as pure functions: averages, confidence intervals, pass@k.

Rollouts of one example resemble each other, so the example is the unit: an average is the mean of the examples' means,
and its interval comes from their spread. Rollouts that failed (no engine, a broken environment) say nothing about the
policy: they are counted, and left out.
"""

import math
from collections.abc import Mapping, Sequence

from orchestrator.values.rollout import Rollout, RolloutFailure

Z95 = 1.96
"""Standard errors to either side of a mean that 95 % of a normal distribution lie within."""

Results = Mapping[str, Sequence[Rollout | RolloutFailure]]
"""By example id."""


def eval_metrics(env_name: str, results: Results, pass_reward: float) -> dict[str, float]:
    """`{metric}/{env_name}/{stat}` of one environment. A figure that nothing is known about is left out."""
    finished = [
        rollouts
        for outcomes in results.values()
        if (rollouts := [outcome for outcome in outcomes if isinstance(outcome, Rollout)])
    ]
    num_rollouts = sum(map(len, finished))
    num_failed = sum(map(len, results.values())) - num_rollouts
    values = {
        f"eval_rollouts/{env_name}/finished": float(num_rollouts),
        f"eval_rollouts/{env_name}/failed": float(num_failed),
    }
    if not finished:
        return values
    mean, margin = mean_with_margin([_mean([rollout.reward for rollout in rollouts]) for rollouts in finished])
    values[f"eval_reward/{env_name}/mean"] = mean
    if margin is not None:
        values[f"eval_reward/{env_name}/ci95"] = margin
    values[f"eval_length/{env_name}/mean"] = (
        sum(rollout.num_sampled_tokens for rollouts in finished for rollout in rollouts) / num_rollouts
    )
    counts = [(len(rollouts), sum(rollout.reward >= pass_reward for rollout in rollouts)) for rollouts in finished]
    return values | {f"eval_pass/{env_name}/at_{k}": value for k, value in pass_curve(counts).items()}


def mean_with_margin(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and half the width of its 95 % interval, which one value alone does not have."""
    mean, num = _mean(values), len(values)
    if num < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (num - 1)
    return mean, Z95 * math.sqrt(variance / num)


def pass_at_k(num_tries: int, num_passed: int, k: int) -> float:
    """Chance that `k` of the tries, drawn without replacement, hold one that passed: unbiased. `k <= num_tries`."""
    return 1.0 - math.comb(num_tries - num_passed, k) / math.comb(num_tries, k)


def pass_curve(counts: Sequence[tuple[int, int]]) -> dict[int, float]:
    """pass@k for k = 1, 2, 4, ... from `(tries, passed)` of every example that has at least k tries."""
    curve = {}
    k = 1
    while able := [(tries, passed) for tries, passed in counts if tries >= k]:
        curve[k] = _mean([pass_at_k(tries, passed, k) for tries, passed in able])
        k *= 2
    return curve


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
