"""The loss of one micro batch: `rl` + `ce` + `ref_kl`, each weighted per token and divided by global counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.losses.protocol import RlInputs, RlLoss, RlOutputs
from trainer.model.logprobs import TokenScores
from trainer.planning.pack import MicroBatch

COMPONENTS = ("rl", "ce", "ref_kl")
"""Summands of the loss, in the order of every table of them."""


@dataclass(frozen=True)
class Denominators:
    """Share of the loss that one member token has, by component and unit.

    Counted on the tokens really trained (after cutting), summed over ranks once per optimizer step. Since every rank
    divides by the same numbers and gradients are summed, the gradient is that of the mean over the global
    mini-batch, however it is split. A token of unit u counts 1 / (member tokens of u x units that have members): the
    mean over units of the mean over the tokens of each (`Weighting`).
    """

    shares: Tensor
    """float32[components, units]: 0 for a unit without members."""
    present: frozenset[str]
    """Components that any token, on any rank, belongs to."""

    @classmethod
    def of(cls, members: Tensor, device: torch.device) -> "Denominators":
        """From `count_members` of all ranks added up, on the host."""
        has_members = members.any(dim=1).tolist()
        present = frozenset(name for name, any_token in zip(COMPONENTS, has_members, strict=True) if any_token)
        return cls(unit_shares(members).float().to(device), present)

    def average(self, component: str, losses: Tensor, weights: Tensor, units: Tensor) -> Tensor:
        """This micro batch's summand of the mean of `component`, from its losses, weights and units by token."""
        return (losses * weights * self.shares[COMPONENTS.index(component)][units]).sum()


def unit_shares(members: Tensor) -> Tensor:
    """Share of one member token of each unit in the mean over units, from the members of each: [..., units] both."""
    num_units = torch.count_nonzero(members, dim=-1).unsqueeze(-1)
    return torch.where(members > 0, 1.0 / (members * num_units), 0.0)


def count_members(micro_batches: Sequence[MicroBatch], num_units: int) -> Tensor:
    """float64[components, units] on the host: member tokens on this rank."""
    counts = torch.zeros(len(COMPONENTS), num_units, dtype=torch.float64)
    for micro_batch in micro_batches:
        tokens, units = micro_batch.loss_tokens, micro_batch.token_units
        for place, weights in enumerate((tokens.rl_weights, tokens.ce_weights, tokens.ref_kl_weights)):
            if weights is not None:
                counts[place].index_add_(0, units, (weights != 0).double())
    return counts


MAX_WEIGHT = 10.0
"""Importance weights of `ref_kl` are held here: a few tokens that the behaviour policy found unlikely must not be the
batch."""


@dataclass(frozen=True)
class LossReport:
    """`total` has the gradient; `parts` are its detached summands by component, without those that have no tokens."""

    total: Tensor
    parts: dict[str, Tensor]
    rl: RlOutputs | None
    """What the `rl` loss said; `None` if no token belongs to it."""


def micro_batch_loss(batch: MicroBatch, scores: TokenScores, loss: RlLoss, denominators: Denominators) -> LossReport:
    """This micro batch's share of the loss of the global mini-batch. A dummy's is 0, with a graph that still reaches
    every parameter, because the other ranks' collectives wait for it."""
    tokens, units, parts, rl = batch.loss_tokens, batch.token_units, {}, None
    if tokens.rl_weights is not None:
        rl = loss(rl_inputs(batch, scores))
        parts["rl"] = denominators.average("rl", rl.losses, tokens.rl_weights, units)
    if tokens.ce_weights is not None:
        parts["ce"] = denominators.average("ce", -scores.logprobs, tokens.ce_weights, units)
    if tokens.ref_kl_weights is not None and tokens.ref_logprobs is not None:
        distances = ref_kl_losses(scores.logprobs, tokens.logprobs, tokens.ref_logprobs)
        parts["ref_kl"] = denominators.average("ref_kl", distances, tokens.ref_kl_weights, units)
    total = sum(parts.values(), start=scores.logprobs.sum() * 0.0)
    return LossReport(total, {name: part.detach() for name, part in parts.items()}, rl)


def rl_inputs(batch: MicroBatch, scores: TokenScores) -> RlInputs:
    """What the `rl` loss sees of a micro batch."""
    tokens = batch.loss_tokens
    weights = tokens.rl_weights
    return RlInputs(
        logprobs=scores.logprobs,
        behaviour_logprobs=tokens.logprobs,
        advantages=tokens.advantages,
        members=tokens.index < 0 if weights is None else weights != 0,
        segments=tokens.segments,
        num_segments=batch.sample_count,
    )


def ref_kl_losses(logprobs: Tensor, behaviour_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """float32[L]: distance to a reference policy on sampled tokens, for distillation on the policy's own samples.

    With policy p, behaviour policy b and reference q, a sampled token's loss is `w * log(p / q)` and its gradient
    `w * log(p / q) * grad log p`, with the importance weight `w = p / b`, which has no gradient of its own. Over tokens
    sampled from b, both are unbiased: the mean is KL(p || q), and the mean gradient is its gradient, since
    `grad KL(p || q) = E_p[log(p / q) * grad log p]`. (Differentiating `log(p / q)` itself would give a gradient of mean
    0, and half its square, the other common choice, the right gradient but the wrong value, and both only for p = b.)
    """
    fixed = logprobs.detach()
    weights = (fixed - behaviour_logprobs).exp().clamp(max=MAX_WEIGHT)
    signal = weights * (fixed - ref_logprobs)
    return signal * (logprobs - fixed).exp()
