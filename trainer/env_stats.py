"""`EnvStats`: mean, spread and extremes of per-token and per-sample values, by env, reduced by sums.

Values stay on the device until `totals()`, which costs two small collectives per step, whatever the number of tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.reduction import max_over_ranks, sum_over_ranks

ALL = "all"
"""Key of the aggregate; no env may have this name."""


class EnvStats:
    """One table of [metric, env] sums. All ranks must make it with the same names, in the same order."""

    def __init__(self, metric_names: tuple[str, ...], env_names: tuple[str, ...], device: torch.device) -> None:
        self._metric_names = metric_names
        self._env_names = env_names
        shape = (len(metric_names), len(env_names))
        self._sums = torch.zeros(*shape, 3, dtype=torch.float64, device=device)  # count, sum, sum of squares
        self._extremes = torch.full((*shape, 2), -math.inf, dtype=torch.float64, device=device)  # max of -x, of x

    def add(self, metric: str, values: Tensor, env_ids: Tensor, members: Tensor | None = None) -> None:
        """Count `values[i]` for env `env_ids[i]`, wherever `members` (default: everywhere) is true."""
        place = self._metric_names.index(metric)
        values = values.detach().double()
        counted = torch.ones_like(values, dtype=torch.bool) if members is None else members
        kept = torch.where(counted, values, 0.0)
        rows = torch.stack((counted.double(), kept, kept.square()), dim=-1)
        self._sums[place].index_add_(0, env_ids, rows)
        signed = torch.stack((-values, values), dim=-1).masked_fill(~counted[:, None], -math.inf)
        self._extremes[place].scatter_reduce_(0, env_ids[:, None].expand_as(signed), signed, "amax")

    def totals(self) -> "EnvTotals":
        """What all ranks counted. A collective call."""
        sums, extremes = sum_over_ranks(self._sums).cpu(), max_over_ranks(self._extremes).cpu()
        return EnvTotals(self._metric_names, self._env_names, sums, extremes)


@dataclass(frozen=True)
class EnvTotals:
    """Sums and extremes over all ranks, on the host. Those of several optimizer steps of one batch can be added."""

    metric_names: tuple[str, ...]
    env_names: tuple[str, ...]
    sums: Tensor
    """float64[metrics, envs, 3]: count, sum, sum of squares."""
    extremes: Tensor
    """float64[metrics, envs, 2]: largest -x, largest x."""

    def __add__(self, other: "EnvTotals") -> "EnvTotals":
        extremes = torch.maximum(self.extremes, other.extremes)
        return EnvTotals(self.metric_names, self.env_names, self.sums + other.sums, extremes)

    def beside(self, other: "EnvTotals") -> "EnvTotals":
        """The metrics of both, which are different ones of the same envs."""
        assert self.env_names == other.env_names, "totals of different envs"
        sums, extremes = torch.cat((self.sums, other.sums)), torch.cat((self.extremes, other.extremes))
        return EnvTotals(self.metric_names + other.metric_names, self.env_names, sums, extremes)

    def metrics(self) -> dict[str, float]:
        """`{metric}/{all|env}/{mean|std|min|max}`; what nothing was counted for is left out."""
        result: dict[str, float] = {}
        for place, metric in enumerate(self.metric_names):
            result.update(_summary(f"{metric}/{ALL}", self.sums[place].sum(0), self.extremes[place].amax(0)))
            for env, env_name in enumerate(self.env_names):
                result.update(_summary(f"{metric}/{env_name}", self.sums[place, env], self.extremes[place, env]))
        return result


def _summary(key: str, sums: Tensor, extremes: Tensor) -> dict[str, float]:
    count, total, squares = sums.tolist()
    if count == 0:
        return {}
    mean = total / count
    negative_min, maximum = extremes.tolist()
    return {
        f"{key}/mean": mean,
        f"{key}/std": math.sqrt(max(squares / count - mean * mean, 0.0)),
        f"{key}/min": -negative_min,
        f"{key}/max": maximum,
    }
