"""`CriticStep`: the critic's half of an optimizer step. It shares micro batches, weighting and guard with the policy's.

Value losses are divided by the global counts of the mini-batch, as every part of the loss is: the mean over units of
the mean over the trained values of each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.accounting import EnvStats, EnvTotals
from trainer.critic.critic import CriticLearner
from trainer.critic.values import BatchValues, ValueTargets
from trainer.losses.components import unit_shares
from trainer.model.logprobs import TokenScores
from trainer.planning.pack import MicroBatch
from trainer.ranks import sum_over_ranks

METRICS = ("value", "return", "is_value_clipped")
"""Of values that are trained, by env."""


class NoCriticStep:
    """The critic's half of a step without a critic: the policy is trained alone."""

    def learners(self) -> list[CriticLearner]:
        """What the step trains beside the policy."""
        return []

    def backward(self, place: int, policy_loss: Tensor, batch: MicroBatch, scores: TokenScores) -> None:
        """Add the gradients of `policy_loss`, and of the value loss if there is one, of micro batch `place`."""
        policy_loss.backward()  # type: ignore[no-untyped-call]

    def total_loss(self) -> float:
        """The value loss over all ranks, before its factor. Collective."""
        return 0.0

    def add_totals(self, totals: EnvTotals) -> EnvTotals:
        """`totals` of the policy, with those of the critic beside them. Collective."""
        return totals

    def metrics(self, loss: float, grad_norms: Sequence[float]) -> dict[str, float]:
        """Metrics of the critic that are not by env; `grad_norms` are those of `learners()`."""
        return {}


class CriticStep(NoCriticStep):
    """The critic's half for one mini-batch. Made by all ranks together, before its first forward pass."""

    def __init__(
        self,
        learner: CriticLearner,
        values: BatchValues,
        micro_batches: Sequence[MicroBatch],
        env_names: tuple[str, ...],
        num_units: int,
    ) -> None:
        self.learner = learner
        self._values = values
        self._device = next(learner.critic.parameters()).device
        self._targets = [values.targets(batch) for batch in micro_batches]
        members = torch.zeros(num_units, dtype=torch.float64)
        for batch, targets in zip(micro_batches, self._targets, strict=True):
            members.index_add_(0, batch.token_units, targets.members.double())
        self._shares = unit_shares(sum_over_ranks(members)).float().to(self._device)
        self._stats = EnvStats(METRICS, env_names, self._device)
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)

    def learners(self) -> list[CriticLearner]:
        return [self.learner]

    def backward(self, place: int, policy_loss: Tensor, batch: MicroBatch, scores: TokenScores) -> None:
        targets = self._targets[place].to(self._device)
        self.learner.critic.backward(
            policy_loss, lambda values: self._value_loss(values, targets, batch), batch, scores
        )

    def total_loss(self) -> float:
        return float(sum_over_ranks(self._loss))

    def add_totals(self, totals: EnvTotals) -> EnvTotals:
        return totals.beside(self._stats.totals())

    def metrics(self, loss: float, grad_norms: Sequence[float]) -> dict[str, float]:
        """Loss, gradient norm, learning rate, and the explained variance of the values."""
        (grad_norm,) = grad_norms
        rate = float(self.learner.optimizer.param_groups[0]["lr"])
        own = {"loss/value": loss, "critic/grad_norm": grad_norm, "critic/lr": rate}
        return own | self._values.metrics()

    def _value_loss(self, values: Tensor, targets: ValueTargets, batch: MicroBatch) -> Tensor:
        losses, is_clipped = value_losses(values, targets.old_values, targets.returns, self.learner.config.clip)
        share = (losses * targets.members * self._shares[batch.token_units]).sum()
        self._loss += share.detach()
        if not batch.is_dummy:
            envs = batch.env_ids[batch.loss_tokens.segments]
            for name, column in (("value", values), ("return", targets.returns), ("is_value_clipped", is_clipped)):
                self._stats.add(name, column, envs, targets.members)
        return self.learner.config.loss_weight * share


NO_CRITIC = NoCriticStep()


class ValueLosses(NamedTuple):
    """One entry per value."""

    losses: Tensor
    """float32[L]: not weighted, not normalised."""
    is_clipped: Tensor
    """bool[L]: the value moved beyond the limit towards its return, and has no gradient."""


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueLosses:
    """`max((V - R)^2, (V_old + clip(V - V_old) - R)^2) / 2`."""
    distances = (values - returns).square()
    if clip is None:
        return ValueLosses(0.5 * distances, torch.zeros_like(values, dtype=torch.bool))
    held = old_values + (values - old_values).clamp(-clip, clip)
    held_distances = (held - returns).square()
    return ValueLosses(0.5 * torch.maximum(distances, held_distances), (held_distances > distances).detach())
