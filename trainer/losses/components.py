"""The loss of one micro batch: `rl` + `ce` + `ref_kl`, each weighted per token and divided by its global count.

`ref_kl` is half the squared log ratio to the reference policy: on tokens that the policy sampled, its gradient is
that of KL(policy || reference).
"""

from dataclasses import dataclass

from torch import Tensor

from trainer.denominators import Denominators
from trainer.logprobs import TokenScores
from trainer.losses.protocol import RlInputs, RlLoss, RlOutputs
from trainer.micro_batch import MicroBatch


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
    tokens, parts, rl = batch.loss_tokens, {}, None
    if tokens.rl_weights is not None:
        rl = loss(rl_inputs(batch, scores))
        parts["rl"] = (rl.losses * tokens.rl_weights).sum() / denominators.rl
    if tokens.ce_weights is not None:
        parts["ce"] = -(scores.logprobs * tokens.ce_weights).sum() / denominators.ce
    if tokens.ref_kl_weights is not None and tokens.ref_logprobs is not None:
        distance = (scores.logprobs - tokens.ref_logprobs).square() / 2
        parts["ref_kl"] = (distance * tokens.ref_kl_weights).sum() / denominators.ref_kl
    total = sum(parts.values(), start=scores.logprobs.sum() * 0.0)
    return LossReport(total, {name: part.detach() for name, part in parts.items()}, rl)


def rl_inputs(batch: MicroBatch, scores: TokenScores) -> RlInputs:
    """What the `rl` loss sees of a micro batch."""
    tokens = batch.loss_tokens
    return RlInputs(scores.logprobs, tokens.logprobs, tokens.advantages, tokens.segments, batch.sample_count)
