"""Metrics of one batch, as a pure function: keys are `{metric}/{all|env_name}/{stat}`.

`reward`, `length` (all tokens), `sampled_length`, `truncated` and `duration_s` speak of everything that was generated,
filtered groups included, so that they do not move when the filter bites; `advantage` and `staleness` speak of what is
trained. Failures count by reason, tries that were made again included; rollouts that were cancelled because their group
was lost count under `cancelled`, but not in the share of failures.

`SelectionBias`: what was trained against what was generated, as sums over groups.

`waste` is the share of sampled tokens of **finished** rollouts that were not trained: groups without signal, groups
that a failure dropped, stale groups. A rollout that failed or was cancelled never tells how many tokens it had; it is
in `rollout_waste`, the share of started rollouts (tries included) that were not trained, for whatever reason. Rollouts
that the end of the run cancels belong to no step: the ledger counts them.
`length_bias` is the mean number of sampled tokens of a trained rollout over that of a finished one: below 1, long
rollouts are trained less often than they occur.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.values.group import STALE, AssembledBatch, ScoredGroup, staleness
from orchestrator.values.rollout import FailureReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionBias:
    """Sums over rollouts; tokens are sampled ones."""

    num_started: int = 0
    num_finished: int = 0
    num_trained: int = 0
    finished_tokens: int = 0
    trained_tokens: int = 0
    stale_tokens: int = 0
    """Tokens of finished rollouts that were thrown away for their age."""

    @property
    def waste(self) -> float:
        """Only if something has finished."""
        return 1.0 - self.trained_tokens / self.finished_tokens

    @property
    def stale_waste(self) -> float:
        """The part of `waste` that age is to blame for."""
        return self.stale_tokens / self.finished_tokens

    @property
    def rollout_waste(self) -> float:
        """Only if something was started."""
        return 1.0 - self.num_trained / self.num_started

    @property
    def length_bias(self) -> float:
        """Only if something was trained."""
        return (self.trained_tokens / self.num_trained) / (self.finished_tokens / self.num_finished)


def selection_bias(groups: Iterable[ScoredGroup]) -> SelectionBias:
    """The sums over these groups."""
    started = finished = trained = finished_tokens = trained_tokens = stale_tokens = 0
    for scored in groups:
        tokens = sum(rollout.num_sampled_tokens for _, rollout in scored.group.survivors)
        started += scored.group.num_dispatched
        finished += len(scored.group.survivors)
        finished_tokens += tokens
        if scored.num_trainable:
            trained += scored.num_trainable
            trained_tokens += tokens
        elif scored.filtered == STALE:
            stale_tokens += tokens
    return SelectionBias(
        num_started=started,
        num_finished=finished,
        num_trained=trained,
        finished_tokens=finished_tokens,
        trained_tokens=trained_tokens,
        stale_tokens=stale_tokens,
    )


def selection_bias_metrics(name: str, selection: SelectionBias) -> dict[str, float]:
    """The shares under `waste/{name}/` and `length_bias/{name}/`."""
    values: dict[str, float] = {}
    if selection.num_started:
        values[f"waste/{name}/rollout_share"] = selection.rollout_waste
    if selection.finished_tokens:
        values[f"waste/{name}/share"] = selection.waste
        values[f"waste/{name}/stale_share"] = selection.stale_waste
    if selection.num_trained:
        values[f"length_bias/{name}/ratio"] = selection.length_bias
    return values


ALL = "all"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How the time since the batch before was spent, in seconds; and how full the pipeline is."""

    duration_s: float
    waited_for_policy_s: float
    """The scheduler could not admit because of the staleness bound."""
    waited_for_trainer_s: float
    """A complete batch could not ship because too many were untrained."""
    in_flight: int
    live_version: int


def step_metrics(batch: AssembledBatch, times: StepTimes) -> dict[str, float]:
    """Everything that is logged for batch `batch.step`."""
    envs = batch.by_env
    by_name = {name: _columns(batch.step, groups) for name, groups in envs.items()}
    over_all: dict[str, list[float]] = defaultdict(list)
    for columns in by_name.values():
        for metric, column in columns.items():
            over_all[metric] += column
    values: dict[str, float] = {}
    for name, columns in {ALL: over_all, **by_name}.items():
        for metric, column in columns.items():
            values |= _stats(metric, name, column)
    for name, groups in {ALL: batch.groups, **envs}.items():
        values |= _losses(name, groups) | selection_bias_metrics(name, selection_bias(groups))
    return values | _pipeline_metrics(batch, times, over_all["sampled_length"])


def _columns(step: int, groups: Sequence[ScoredGroup]) -> dict[str, list[float]]:
    """What the rollouts of one environment were, by metric: one number each."""
    generated = [rollout for group in groups for _, rollout in group.group.survivors]
    columns: dict[str, list[float]] = {
        "reward": [rollout.reward for rollout in generated],
        "length": [float(rollout.num_tokens) for rollout in generated],
        "sampled_length": [float(rollout.num_sampled_tokens) for rollout in generated],
        "truncated": [float(rollout.is_truncated) for rollout in generated],
        "duration_s": [rollout.duration_s for rollout in generated],
        "advantage": [advantage for group in groups if group.weights.rl for _, _, advantage in group.trainable],
        "staleness": [float(age) for age in staleness(step, groups)],
    }
    for key in sorted({key for rollout in generated for key in rollout.metrics}):
        columns[f"metric_{key}"] = [rollout.metrics[key] for rollout in generated if key in rollout.metrics]
    return columns


def _stats(metric: str, name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    column = np.asarray(values, dtype=np.float64)
    stats = {"mean": column.mean(), "std": column.std(), "min": column.min(), "max": column.max()}
    return {f"{metric}/{name}/{stat}": float(value) for stat, value in stats.items()}


def _losses(name: str, groups: Iterable[ScoredGroup]) -> dict[str, float]:
    """Failed rollouts by reason, filtered groups by reason."""
    failures: Counter[str] = Counter()
    filtered: Counter[str] = Counter()
    num_rollouts = num_groups = 0
    for group in groups:
        lost = (*group.group.failed_tries, *group.group.failures)
        failures.update(failure.reason.value for _, failure in lost)
        filtered.update([group.filtered] if group.filtered else [])
        num_rollouts += group.group.num_dispatched
        num_groups += 1
    values = {f"failures/{name}/{reason}": float(count) for reason, count in failures.items()}
    values |= {f"filtered/{name}/{reason}": float(count) for reason, count in filtered.items()}
    num_failed = failures.total() - failures[FailureReason.CANCELLED.value]
    values[f"failures/{name}/share"] = num_failed / num_rollouts
    values[f"filtered/{name}/share"] = filtered.total() / num_groups
    return values


def _pipeline_metrics(batch: AssembledBatch, times: StepTimes, sampled_lengths: Sequence[float]) -> dict[str, float]:
    seconds = max(times.duration_s, 1e-9)
    return {
        "throughput/all/tokens_per_s": sum(sampled_lengths) / seconds,
        "throughput/all/rollouts_per_s": len(sampled_lengths) / seconds,
        "batch/all/rollouts": float(sum(group.num_trainable for group in batch.groups)),
        "batch/all/groups": float(len(batch.trained)),
        "in_flight/all/rollouts": float(times.in_flight),
        "policy/all/version": float(times.live_version),
        "time/all/step_s": times.duration_s,
        "time/all/waited_for_policy_s": times.waited_for_policy_s,
        "time/all/waited_for_trainer_s": times.waited_for_trainer_s,
    }


def step_line(step: int, max_steps: int, values: Mapping[str, float]) -> str:
    """The one line that people read per step."""
    return (
        f"step {step}/{max_steps}  reward {values.get('reward/all/mean', float('nan')):.3f}  "
        f"rollouts {values['batch/all/rollouts']:.0f}  filtered {values['filtered/all/share']:.0%}  "
        f"failed {values['failures/all/share']:.0%}  length {values.get('sampled_length/all/mean', 0):.1f}  "
        f"staleness {values.get('staleness/all/mean', 0):.2f}/{values.get('staleness/all/max', 0):.0f}  "
        f"{values['throughput/all/tokens_per_s']:.0f} tok/s  {values['time/all/step_s']:.1f} s"
    )
