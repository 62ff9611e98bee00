"""`Accounting`: what was really trained. Dummies and padding never count.

`EnvStats`: mean, spread and extremes of per-token and per-sample values, by env, reduced by sums.

Values stay on the device until `totals()`, which costs two small collectives per step, whatever the number of tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.losses.components import rl_inputs
from trainer.losses.protocol import RlOutputs
from trainer.model.logprobs import TokenScores
from trainer.planning.pack import LossTokens, MicroBatch
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


_NAMES = ("tokens", "loss_tokens", "samples", "micro_batches")
_IMAGE_NAMES = ("images", "image_tokens", "image_patches")
"""Left out of the metrics where there is no image."""


@dataclass(frozen=True)
class Accounting:
    """Sums over micro batches with samples, and the largest of them in tokens."""

    num_tokens: int
    num_loss_tokens: int
    num_samples: int
    num_micro_batches: int
    max_micro_batch_tokens: int
    num_images: int = 0
    num_image_tokens: int = 0
    """Of the tokens, those that stand for images."""
    num_image_patches: int = 0
    """What the vision tower has seen."""

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatch]) -> "Accounting":
        """The sums over the micro batches of this rank."""
        real = [batch for batch in micro_batches if not batch.is_dummy]
        images = [batch.images for batch in real if batch.images is not None]
        return cls(
            num_tokens=sum(batch.num_tokens for batch in real),
            num_loss_tokens=sum(batch.num_loss_tokens for batch in real),
            num_samples=sum(batch.sample_count for batch in real),
            num_micro_batches=len(real),
            max_micro_batch_tokens=max((batch.num_tokens for batch in real), default=0),
            num_images=sum(part.num_images for part in images),
            num_image_tokens=sum(part.num_tokens for part in images),
            num_image_patches=sum(part.num_patches for part in images),
        )

    @classmethod
    def of_all_ranks(cls, sums: Tensor, max_micro_batch_tokens: float) -> "Accounting":
        """From the added `sums()` of all ranks, and the largest micro batch of any."""
        tokens, loss_tokens, samples, micro_batches, images, image_tokens, image_patches = map(int, sums.tolist())
        return cls(
            num_tokens=tokens,
            num_loss_tokens=loss_tokens,
            num_samples=samples,
            num_micro_batches=micro_batches,
            max_micro_batch_tokens=int(max_micro_batch_tokens),
            num_images=images,
            num_image_tokens=image_tokens,
            num_image_patches=image_patches,
        )

    def sums(self) -> Tensor:
        """float64[7] on the host: what adds up over ranks."""
        counts = (self.num_tokens, self.num_loss_tokens, self.num_samples, self.num_micro_batches)
        image_counts = (self.num_images, self.num_image_tokens, self.num_image_patches)
        return torch.tensor(counts + image_counts, dtype=torch.float64)

    def metrics(self, all_ranks: "Accounting", cap: int) -> dict[str, float]:
        """Metrics of this rank and of all ranks, by name."""
        total = dict(zip(_NAMES + _IMAGE_NAMES, all_ranks.sums().tolist(), strict=True))
        shown = _NAMES + _IMAGE_NAMES if total["images"] else _NAMES
        local = dict(zip(_NAMES + _IMAGE_NAMES, self.sums().tolist(), strict=True))
        return {
            **{f"{name}/local": local[name] for name in shown},
            **{f"{name}/global": total[name] for name in shown},
            "micro_batch_tokens/max": float(all_ranks.max_micro_batch_tokens),
            "micro_batch_max_tokens": float(cap),
        }
