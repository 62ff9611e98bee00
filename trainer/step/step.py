"""`train_mini_batch`: one optimizer step, the same on every rank.

    count members ─▶ for each micro batch: forward, loss, backward (sums gradients over ranks) ─▶ guard ─▶ clip ─▶ step

Every rank must call it with the same number of micro batches (the plan sees to that: the backward pass of one rank
waits for the others). Nothing is read back from the device before the last micro batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.accounting import METRICS, Accounting, EnvStats, observe
from trainer.critic.step import NO_CRITIC, NoCriticStep
from trainer.errors import PlanError
from trainer.losses.components import COMPONENTS, Denominators, count_members, micro_batch_loss
from trainer.losses.protocol import RlLoss, RlOutputs
from trainer.model.logprobs import TokenScores
from trainer.model.policy import Policy
from trainer.planning.pack import MicroBatch
from trainer.ranks import max_over_ranks, sum_over_ranks
from trainer.step.report import StepReport

Watch = Callable[[MicroBatch, TokenScores, RlOutputs | None], None]
"""Called after each backward pass with what was computed. It must not change any of it."""


@dataclass(frozen=True)
class StepSettings:
    """What does not change between the optimizer steps of a batch."""

    env_names: tuple[str, ...]
    max_grad_norm: float
    micro_batch_tokens: int
    num_units: int = 1
    """Units of the plan's `Weighting`."""
    cp: int = 1
    """Ranks that share each row: all of them count it, so each counts 1/cp of it."""


@dataclass(frozen=True)
class _Learner:
    """A module and the optimizer that trains it."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    max_grad_norm: float

    def parameters_with_gradient(self) -> list[torch.nn.Parameter]:
        """All of which the optimizer must hold: FSDP swaps parameter objects, and an optimizer made at the wrong moment
        would step on discarded ones, silently."""
        parameters = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        assert all(id(parameter) in held for parameter in parameters), "the optimizer holds other parameters"
        return parameters


def train_mini_batch(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[MicroBatch],
    loss: RlLoss,
    settings: StepSettings,
    watch: Watch | None = None,
    critic: NoCriticStep = NO_CRITIC,
) -> StepReport:
    """Train on the micro batches of this rank, and with them the critic if there is one: both step, or none. Leaves no
    gradient behind. Raises `PlanError` if, over all ranks, not one token would be trained."""
    device = next(policy.parameters()).device
    accounting = Accounting.of(micro_batches)
    members, global_sums = _count_globally(micro_batches, accounting, settings)
    denominators = Denominators.of(members, device)
    stats = EnvStats(METRICS, settings.env_names, device)
    learners = [_Learner(policy, optimizer, settings.max_grad_norm)]
    learners += [_Learner(own.critic, own.optimizer, own.max_grad_norm) for own in critic.learners()]
    for learner in learners:
        learner.optimizer.zero_grad(set_to_none=True)
    local_losses = _backward(policy, micro_batches, loss, denominators, stats, watch, critic, settings.cp)
    losses = dict(zip(COMPONENTS, sum_over_ranks(local_losses).tolist(), strict=True))
    value_loss = critic.total_loss()
    (grad_norm, *critic_norms), stepped = _guarded_step(learners, (*losses.values(), value_loss))
    env_totals = critic.add_totals(stats.totals())
    all_ranks = Accounting.of_all_ranks(global_sums, _largest(accounting))
    metrics = {
        **accounting.metrics(all_ranks, settings.micro_batch_tokens),
        **env_totals.metrics(),
        **{f"loss/{name}": losses[name] for name in COMPONENTS if name in denominators.present},
        "loss": sum(losses.values()),
        "grad_norm": grad_norm,
        **critic.metrics(value_loss, critic_norms),
    }
    return StepReport(stepped, metrics, all_ranks, env_totals)


def _count_globally(
    micro_batches: Sequence[MicroBatch], accounting: Accounting, settings: StepSettings
) -> tuple[Tensor, Tensor]:
    """(members of each component and unit, sums of the accounting), over all ranks. One collective for both."""
    local_members, local_sums = count_members(micro_batches, settings.num_units), accounting.sums()
    totals = sum_over_ranks(torch.cat((local_members.flatten(), local_sums))) / settings.cp
    members, sums = totals[: -len(local_sums)].view_as(local_members), totals[-len(local_sums) :]
    if not members.any():
        raise PlanError(
            f"none of the {int(sums[2])} samples has a trained token within seq_len: raise model.seq_len, or look at "
            "the loss masks the orchestrator sends, and at the samples that were left out before"
        )
    return members, sums


def _largest(accounting: Accounting) -> float:
    return float(max_over_ranks(torch.tensor(float(accounting.max_micro_batch_tokens))))


def _backward(
    policy: Policy,
    micro_batches: Sequence[MicroBatch],
    loss: RlLoss,
    denominators: Denominators,
    stats: EnvStats,
    watch: Watch | None,
    critic: NoCriticStep,
    cp: int,
) -> Tensor:
    """float64[3]: this rank's share of each component. Gradients are in the parameters."""
    device = denominators.shares.device
    losses = torch.zeros(len(COMPONENTS), dtype=torch.float64, device=device)
    for index, host_batch in enumerate(micro_batches):
        batch = host_batch.to(device)
        scores = policy(batch)
        report = micro_batch_loss(batch, scores, loss, denominators)
        critic.backward(index, report.total / cp, batch, scores)
        for place, name in enumerate(COMPONENTS):
            if name in report.parts:
                losses[place] += report.parts[name] / cp
        observe(stats, batch, scores, report.rl)
        if watch is not None:
            watch(batch, scores, report.rl)
    return losses


def _guarded_step(learners: Sequence[_Learner], losses: Sequence[float]) -> tuple[list[float], bool]:
    """(gradient norm of each, whether the weights changed). The sums that are judged are those of all ranks, so all
    agree."""
    held = [learner.parameters_with_gradient() for learner in learners]
    norms = [_total_norm(parameters) for parameters in held]
    grad_norms = [float(norm) for norm in norms]
    stepped = _agreed(all(map(math.isfinite, (*grad_norms, *losses))))
    for learner, parameters, norm in zip(learners, held, norms, strict=True):
        if stepped:
            torch.nn.utils.clip_grads_with_norm_(parameters, learner.max_grad_norm, norm)
            learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=True)
    return grad_norms, stepped


def _agreed(is_finite: bool) -> bool:
    """Whether `is_finite` holds on every rank. Collective."""
    return float(sum_over_ranks(torch.tensor(0.0 if is_finite else 1.0))) == 0.0


def _total_norm(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
