"""`EnvStats`: mean, spread and extremes of per-token and per-sample values, by env, reduced by sums.

Values stay on the device until `totals()`, which costs two small collectives per step, whatever the number of tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.losses.components import rl_inputs
from trainer.losses.protocol import RlOutputs
from trainer.model.logprobs import TokenScores
from trainer.planning.micro_batch import LossTokens, MicroBatch
from trainer.ranks import max_over_ranks, sum_over_ranks

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


METRICS = (
    "entropy",
    "mismatch_kl",
    "ratio",
    "is_masked",
    "is_masked_high",
    "is_masked_low",
    "reward",
    "advantage",
    "length",
    "trained_length",
)
"""The first six count tokens, the others samples. `mismatch_kl` is ratio - 1 - log ratio: 0 on policy, else more."""


def observe(stats: EnvStats, batch: MicroBatch, scores: TokenScores, rl: RlOutputs | None) -> None:
    """Count one micro batch. No synchronisation with the device."""
    if batch.is_dummy:
        return
    tokens = batch.loss_tokens
    token_envs = batch.env_ids[tokens.segments]
    stats.add("entropy", scores.entropies, token_envs)
    members = _off_policy_members(tokens)
    if members is not None:
        inputs = rl_inputs(batch, scores)
        ratio = inputs.ratio.detach()
        stats.add("ratio", ratio, token_envs, members)
        stats.add("mismatch_kl", ratio - 1 - inputs.log_ratio.detach(), token_envs, members)
    if rl is not None and tokens.rl_weights is not None:
        for name in ("is_masked", "is_masked_high", "is_masked_low"):
            stats.add(name, getattr(rl, name), token_envs, tokens.rl_weights != 0)
    _observe_samples(stats, batch)


def _observe_samples(stats: EnvStats, batch: MicroBatch) -> None:
    lengths = torch.tensor(batch.seq_lens[: batch.sample_count], device=batch.env_ids.device)
    trained = torch.zeros_like(lengths).index_add_(
        0, batch.loss_tokens.segments, torch.ones_like(batch.loss_tokens.segments)
    )
    stats.add("reward", batch.rewards, batch.env_ids)
    stats.add("advantage", batch.advantages, batch.env_ids)
    stats.add("length", lengths, batch.env_ids)
    stats.add("trained_length", trained, batch.env_ids)


def _off_policy_members(tokens: LossTokens) -> Tensor | None:
    """Tokens for which the ratio to the behaviour policy means something; `None`: no such token."""
    streams = [weights != 0 for weights in (tokens.rl_weights, tokens.ref_kl_weights) if weights is not None]
    return torch.stack(streams).any(0) if streams else None
