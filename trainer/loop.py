"""The training loop: batch N makes version N-1 into version N.

    inbox ─▶ plan ─▶ fetch own rows ─▶ pack ─▶ optimizer step(s) ─▶ publish N ─▶ `Trained` ─▶ checkpoint ─▶ `Committed`

Every rank runs it in lock-step. The order is the promise: a version can be loaded before the orchestrator hears that
the step is trained, and a checkpoint is durable before the orchestrator may forget the batch.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import torch
from loguru import logger

from trainer.batches.inbox import Inbox, Reporter
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.checkpoints.state import TrainState
from trainer.checks.canary import make_canary
from trainer.config.trainer import TrainerConfig
from trainer.critic.critic import CriticLearner
from trainer.critic.step import NO_CRITIC, CriticStep, NoCriticStep
from trainer.critic.values import estimate_values
from trainer.images.samples import CheckedSamples, check_image_samples
from trainer.losses.protocol import RlLoss
from trainer.model.policy import Policy
from trainer.observe.non_finite import NonFiniteGuard
from trainer.observe.telemetry import Telemetry
from trainer.observe.token_export import TokenExport
from trainer.optimizer import current_learning_rate, learning_rate, set_learning_rate
from trainer.planning.layout import Layout
from trainer.planning.pack import MicroBatch, pack_mini_batch
from trainer.planning.plan import StepPlan, plan_step
from trainer.ranks import Ranks
from trainer.step.report import StepReport, TrainProgress
from trainer.step.step import StepSettings, train_mini_batch
from trainer.weights.channel import WeightChannel
from transport.wire.manifest import BatchManifest

MakeCriticStep = Callable[[Sequence[MicroBatch], tuple[str, ...], int], NoCriticStep]
"""From the micro batches, env names and number of units of a mini-batch to the critic's half of its step."""


@dataclass(frozen=True)
class Training:
    """The parts of a run. They do not know each other: the loop below is what joins them."""

    config: TrainerConfig
    ranks: Ranks
    layout: Layout
    policy: Policy
    state: TrainState
    """What is trained, and what a checkpoint holds: the policy's weights, its optimizer, the critic."""
    loss: RlLoss
    inbox: Inbox
    reporter: Reporter
    publisher: WeightChannel
    checkpoints: Checkpoints
    non_finite: NonFiniteGuard
    telemetry: Telemetry
    token_export: TokenExport | None = None


def train(run: Training, progress: TrainProgress) -> TrainProgress:
    """Train until the run ends or a stop is requested; everything that was trained is committed on return."""
    publish(run, progress.step)  # engines may have lost, or never had, the version that this process starts from
    for batch in run.inbox.batches(after=progress.step):
        plan = plan_step(batch, run.layout)
        run.ranks.require_same(plan.digest, f"the plan of step {batch.step}")
        reports = optimize(run, batch, plan)
        progress = progress.after(batch.step, reports)
        run.non_finite.check(batch, reports, progress)
        publish(run, version=batch.step)
        run.reporter.trained(batch.step)
        run.telemetry.step(batch, reports, progress, current_learning_rate(run.state.optimizer))
        run.checkpoints.saved()  # commits a save in the background that has ended meanwhile
        if run.checkpoints.due(batch.step):
            with run.telemetry.timed("checkpoint"):
                run.checkpoints.save(run.state, progress)
    with run.telemetry.timed("checkpoint"):
        run.checkpoints.finish(run.state, progress)
    return progress


def optimize(run: Training, batch: BatchManifest, plan: StepPlan) -> list[StepReport]:
    """The optimizer steps of one batch: one per mini-batch and epoch."""
    with run.telemetry.timed("fetch"):
        checked = fetch_samples(run, batch, plan)
    set_rate(run, run.state.optimizer, run.config.optimizer.lr, batch.step)
    critic_step: MakeCriticStep = no_critic_step
    if run.state.critic is not None:  # the one place where a run with a critic differs
        checked, critic_step = value_samples(run, run.state.critic, batch, plan, checked)
    max_grad_norm, max_tokens = run.config.optimizer.max_grad_norm, run.layout.micro_batch_tokens
    settings = StepSettings(plan.env_names, max_grad_norm, max_tokens, plan.num_units, run.layout.cp)
    recorder = run.token_export.recorder(plan, checked.samples) if run.token_export else None
    with run.telemetry.timed("train"):
        reports = []
        for index in plan.visits:
            micro_batches = pack_own(run, plan, index, checked)
            critic = critic_step(micro_batches, settings.env_names, settings.num_units)
            report = train_mini_batch(
                run.policy, run.state.optimizer, micro_batches, run.loss, settings, watch=recorder, critic=critic
            )
            reports.append(with_refused(report, plan.mini_batches[index].counts.num_samples))
    if run.token_export and recorder:
        with run.telemetry.timed("token_export"):
            run.token_export.write(recorder)
    return reports


def fetch_samples(run: Training, batch: BatchManifest, plan: StepPlan) -> CheckedSamples:
    """The samples of this rank; those that cannot be trained are named in the log, once each."""
    samples = run.inbox.fetch(batch, plan.rows_for(run.layout.dp_rank).tolist())
    checked = check_image_samples(samples, run.policy.image_spec, plan.seq_len)
    for row, reason in checked.refused.items():
        logger.warning(f"step {batch.step} leaves out row {row}: {reason}")
    return checked


def pack_own(run: Training, plan: StepPlan, mini_batch_index: int, checked: CheckedSamples) -> list[MicroBatch]:
    return pack_mini_batch(
        plan,
        mini_batch_index,
        run.layout.dp_rank,
        checked.samples,
        run.policy.row_multiple,
        images=run.policy.image_spec,
        refused=checked.refused,
    )


def with_refused(report: StepReport, num_planned: int) -> StepReport:
    """The report of a mini-batch of `num_planned` samples, with the number that some rank left out."""
    num_refused = float(num_planned - report.accounting.num_samples)
    return replace(report, metrics=report.metrics | {"samples_refused/global": num_refused}) if num_refused else report


def set_rate(run: Training, optimizer: torch.optim.Optimizer, peak: float, step: int) -> None:
    """Give `optimizer` the learning rate of batch `step`."""
    set_learning_rate(optimizer, learning_rate(step, peak, run.config.schedule, run.config.max_steps))


def value_samples(
    run: Training, critic: CriticLearner, batch: BatchManifest, plan: StepPlan, checked: CheckedSamples
) -> tuple[CheckedSamples, MakeCriticStep]:
    """The samples with the critic's advantages, from values before the first optimizer step of the batch, and what
    makes the critic's half of each step."""
    set_rate(run, critic.optimizer, critic.config.lr, batch.step)
    with run.telemetry.timed("values"):
        indices = range(len(plan.mini_batches))
        micro_batches = itertools.chain.from_iterable(pack_own(run, plan, index, checked) for index in indices)
        values = estimate_values(critic, run.policy, batch, micro_batches, checked.samples)
    return replace(checked, samples=values.with_advantages(checked.samples)), partial(CriticStep, critic, values)


def no_critic_step(micro_batches: Sequence[MicroBatch], env_names: tuple[str, ...], num_units: int) -> NoCriticStep:
    return NO_CRITIC


def publish(run: Training, version: int) -> None:
    """Let engines load what the policy is now, and tell the orchestrator."""
    with run.telemetry.timed("publish"):
        published = run.publisher.publish(run.policy.causal_lm, version)
        run.reporter.published(msgspec.structs.replace(published, canary=make_canary(run.policy)))
