"""The training loop: batch N makes version N-1 into version N.

    inbox ─▶ plan ─▶ fetch own rows ─▶ pack ─▶ optimizer step(s) ─▶ publish N ─▶ `Trained` ─▶ checkpoint ─▶ `Committed`

Every rank runs it in lock-step. The order is the promise: a version can be loaded before the orchestrator hears that
the step is trained, and a checkpoint is durable before the orchestrator may forget the batch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from loguru import logger

from trainer.batches.inbox import Inbox
from trainer.batches.source import Batch
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.checkpoints.state import TrainState
from trainer.checks.canary import make_canary
from trainer.config.trainer import TrainerConfig
from trainer.critic.critic import CriticLearner
from trainer.critic.step import CriticStep
from trainer.critic.values import Assessment, estimate_values
from trainer.images.samples import CheckedSamples, check_image_samples
from trainer.losses.protocol import RlLoss
from trainer.model.policy import Policy
from trainer.observe.non_finite import NonFiniteGuard
from trainer.observe.telemetry import Telemetry
from trainer.observe.token_export import TokenExport
from trainer.optimizer import current_learning_rate, learning_rate, set_learning_rate
from trainer.planning.layout import Layout
from trainer.planning.micro_batch import MicroBatch
from trainer.planning.pack import pack_mini_batch
from trainer.planning.plan import StepPlan, plan_step
from trainer.ranks import Ranks
from trainer.step.report import StepReport, TrainProgress
from trainer.step.step import StepSettings, train_mini_batch
from trainer.weights.channel import WeightChannel


@dataclass(frozen=True)
class Training:
    """The parts of a run. They do not know each other: the loop below is what joins them."""

    config: TrainerConfig
    ranks: Ranks
    layout: Layout
    policy: Policy
    optimizer: torch.optim.Optimizer
    loss: RlLoss
    inbox: Inbox
    publisher: WeightChannel
    checkpoints: Checkpoints
    non_finite: NonFiniteGuard
    telemetry: Telemetry
    token_export: TokenExport | None = None
    critic: CriticLearner | None = None

    @property
    def state(self) -> TrainState:
        """What a checkpoint holds."""
        return TrainState(self.policy.causal_lm, self.optimizer, self.critic)


def train(run: Training, progress: TrainProgress) -> TrainProgress:
    """Train until the run ends or a stop is requested; everything that was trained is committed on return."""
    committed = progress.step
    publish(run, progress.step)  # engines may have lost, or never had, the version that this process starts from
    for batch in run.inbox.batches(after=progress.step):
        plan = plan_step(batch.manifest, run.layout)
        run.ranks.require_same(plan.digest, f"the plan of step {batch.step}")
        reports = optimize(run, batch, plan)
        progress = progress.after(batch.step, reports)
        run.non_finite.check(batch, reports, progress)
        publish(run, version=batch.step)
        run.inbox.trained(batch.step)
        run.telemetry.step(batch, reports, progress, current_learning_rate(run.optimizer))
        committed = commit_saved(run, committed)
        if run.checkpoints.due(batch.step):
            committed = save(run, progress, committed, wait=not run.config.checkpoint.background)
    while committed < progress.step:
        committed = save(run, progress, committed, wait=True)
    return progress


def optimize(run: Training, batch: Batch, plan: StepPlan) -> list[StepReport]:
    """The optimizer steps of one batch: one per mini-batch and epoch."""
    with run.telemetry.timed("fetch"):
        intake = fetch_samples(run, batch, plan)
    set_rates(run, batch.step)
    assessment = None
    if run.critic is not None:
        with run.telemetry.timed("values"):
            assessment = estimate_batch_values(run, run.critic, batch, plan, intake)
        intake = replace(intake, samples=assessment.with_advantages(intake.samples))
    max_grad_norm, max_tokens = run.config.optimizer.max_grad_norm, run.layout.micro_batch_tokens
    settings = StepSettings(plan.env_names, max_grad_norm, max_tokens, plan.num_units, run.layout.cp)
    recorder = run.token_export.recorder(plan, intake.samples) if run.token_export else None
    with run.telemetry.timed("train"):
        reports = []
        for index in plan.visits:
            micro_batches = pack_own(run, plan, index, intake)
            critic = critic_step(run, assessment, micro_batches, settings)
            report = train_mini_batch(
                run.policy, run.optimizer, micro_batches, run.loss, settings, watch=recorder, critic=critic
            )
            reports.append(with_refused(report, plan.mini_batches[index].counts.num_samples))
    if run.token_export and recorder:
        with run.telemetry.timed("token_export"):
            run.token_export.write(recorder)
    return reports


def fetch_samples(run: Training, batch: Batch, plan: StepPlan) -> CheckedSamples:
    """The samples of this rank; those that cannot be trained are named in the log, once each."""
    samples = run.inbox.fetch(batch, plan.rows_for(run.layout.dp_rank).tolist())
    intake = check_image_samples(samples, run.policy.image_spec, plan.seq_len)
    for row, reason in intake.refused.items():
        logger.warning(f"step {batch.step} leaves out row {row}: {reason}")
    return intake


def pack_own(run: Training, plan: StepPlan, mini_batch_index: int, intake: CheckedSamples) -> list[MicroBatch]:
    """The micro batches of this rank."""
    return pack_mini_batch(
        plan,
        mini_batch_index,
        run.layout.dp_rank,
        intake.samples,
        run.policy.row_multiple,
        images=run.policy.image_spec,
        refused=intake.refused,
    )


def with_refused(report: StepReport, num_planned: int) -> StepReport:
    """The report of a mini-batch of `num_planned` samples, with the number that some rank left out."""
    num_refused = num_planned - report.metrics["samples/global"]
    return replace(report, metrics=report.metrics | {"samples_refused/global": num_refused}) if num_refused else report


def set_rates(run: Training, step: int) -> None:
    """The learning rates of batch `step`."""
    config = run.config
    set_learning_rate(run.optimizer, learning_rate(step, config.optimizer.lr, config.schedule, config.max_steps))
    if run.critic is not None:
        rate = learning_rate(step, run.critic.config.lr, config.schedule, config.max_steps)
        set_learning_rate(run.critic.optimizer, rate)


def estimate_batch_values(
    run: Training, critic: CriticLearner, batch: Batch, plan: StepPlan, intake: CheckedSamples
) -> Assessment:
    """Values and advantages of the whole batch, before its first optimizer step."""
    indices = range(len(plan.mini_batches))
    micro_batches = itertools.chain.from_iterable(pack_own(run, plan, index, intake) for index in indices)
    return estimate_values(critic, run.policy, batch.manifest, micro_batches, intake.samples)


def critic_step(
    run: Training, assessment: Assessment | None, micro_batches: Sequence[MicroBatch], settings: StepSettings
) -> CriticStep | None:
    """The critic's half of an optimizer step, if there is a critic."""
    if run.critic is None or assessment is None:
        return None
    return CriticStep(run.critic, assessment, micro_batches, settings.env_names, settings.num_units)


def publish(run: Training, version: int) -> None:
    """Let engines load what the policy is now, and tell the orchestrator."""
    with run.telemetry.timed("publish"):
        published = run.publisher.publish(run.policy.causal_lm, version)
        run.inbox.published(msgspec.structs.replace(published, canary=make_canary(run.policy)))


def save(run: Training, progress: TrainProgress, committed: int, *, wait: bool) -> int:
    """Save `progress`, after the save before has ended; the last committed step. `wait`: for the end of this save."""
    with run.telemetry.timed("checkpoint"):
        committed = commit_saved(run, committed, wait=True)
        if committed < progress.step:
            run.checkpoints.begin(run.state, progress)
            committed = commit_saved(run, committed, wait=wait)
    return committed


def commit_saved(run: Training, committed: int, *, wait: bool = False) -> int:
    """The last committed step; if a save has ended well, the orchestrator learns of it."""
    step = run.checkpoints.saved(wait=wait)
    if step is None:
        return committed
    run.inbox.commit(step)
    if run.ranks.is_first:
        logger.debug(f"checkpoint {run.checkpoints.folder(step)}")
    return step
