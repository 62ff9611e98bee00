"""The curves of a run, as a pure function of its metric rows."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from runtime.metrics.progress import MetricRow

MAX_POINTS = 600
"""Points of a curve; longer ones are averaged over neighbours."""
ENV = "{env}"
ALL = "all"


class Series(msgspec.Struct, frozen=True):
    """One line of a chart."""

    label: str
    steps: list[float]
    values: list[float]


class Chart(msgspec.Struct, frozen=True):
    """What one chart shows, and how to read it in a sentence."""

    id: str
    title: str
    hint: str
    series: list[Series]


@dataclass(frozen=True, slots=True)
class _Line:
    service: str
    key: str
    """Of the metric; `{env}` stands for every environment, or for all of them if there is only one."""
    label: str
    over: str = ""
    """Key of a metric to divide by."""


@dataclass(frozen=True, slots=True)
class _Plan:
    id: str
    title: str
    hint: str
    lines: tuple[_Line, ...]


PLANS = (
    _Plan(
        "reward",
        "Reward",
        "Mean reward of everything that was generated. It should rise.",
        (_Line("orchestrator", "reward/{env}/mean", ENV),),
    ),
    _Plan(
        "eval",
        "Evaluation",
        "Mean reward of evaluations at a pinned policy version (the step).",
        (_Line("orchestrator", "eval_reward/{env}/mean", ENV),),
    ),
    _Plan(
        "loss",
        "Loss",
        "Of the policy update. In RL it hovers around 0 and need not fall: watch the reward.",
        (_Line("trainer", "loss", "loss"),),
    ),
    _Plan(
        "entropy",
        "Entropy",
        "How undecided the policy is, per trained token (nats). A slow fall is learning, a sudden one is collapse.",
        (_Line("trainer", "entropy/{env}/mean", ENV),),
    ),
    _Plan(
        "mismatch_kl",
        "Mismatch KL",
        "How far the policy that sampled is from the one that is trained. Near 0, or engine and trainer disagree.",
        (_Line("trainer", "mismatch_kl/{env}/mean", ENV),),
    ),
    _Plan(
        "staleness",
        "Staleness",
        "Policy versions between sampling and training. Never above max_staleness.",
        (_Line("trainer", "staleness/mean", "mean"), _Line("trainer", "staleness/max", "max")),
    ),
    _Plan(
        "length_bias",
        "Length bias",
        "Mean length trained over mean length generated. 1: training sees what was generated.",
        (_Line("orchestrator", "length_bias/{env}/ratio", ENV),),
    ),
    _Plan(
        "tokens_per_s",
        "Tokens per second",
        "Trained tokens, prompts included, and sampled tokens.",
        (
            _Line("trainer", "tokens_per_s", "trained"),
            _Line("orchestrator", "throughput/all/tokens_per_s", "sampled"),
        ),
    ),
    _Plan(
        "idle",
        "Idle shares",
        "Share of the time that each side waited for another. A wait counts in the step in which it ended.",
        (
            _Line("trainer", "time/wait_s", "trainer waits for a batch", over="time/step_s"),
            _Line("orchestrator", "time/all/waited_for_policy_s", "sampling waits for weights", over="time/all/step_s"),
            _Line("orchestrator", "time/all/waited_for_trainer_s", "batch waits for trainer", over="time/all/step_s"),
        ),
    ),
    _Plan(
        "masked",
        "Masked tokens",
        "Share of trained tokens that the loss left out because they had changed too much.",
        (_Line("trainer", "is_masked/{env}/mean", ENV),),
    ),
    _Plan(
        "sampled_length",
        "Answer length",
        "Sampled tokens per rollout.",
        (_Line("orchestrator", "sampled_length/{env}/mean", ENV),),
    ),
    _Plan(
        "lost",
        "Filtered and failed",
        "Share of groups without a difference to learn from, and share of rollouts that failed.",
        (
            _Line("orchestrator", "filtered/all/share", "filtered groups"),
            _Line("orchestrator", "failures/all/share", "failed rollouts"),
        ),
    ),
    _Plan(
        "grad_norm",
        "Gradient norm",
        "Before clipping.",
        (_Line("trainer", "grad_norm", "policy"), _Line("trainer", "critic/grad_norm", "critic")),
    ),
    _Plan(
        "value_loss",
        "Value loss",
        "Of the critic, before its factor. It should fall at first; it rises when returns change.",
        (_Line("trainer", "loss/value", "value loss"),),
    ),
    _Plan(
        "explained_variance",
        "Explained variance",
        "How much of the returns the critic foresees. 1: all; 0: no better than their mean; below: worse.",
        (_Line("trainer", "explained_variance/{env}", ENV),),
    ),
)


_COORDINATES = {f"{service}: {key}" for service in ("orchestrator", "trainer", "inference") for key in ("step", "time")}


def charts(rows: Mapping[str, Sequence[MetricRow]]) -> list[Chart]:
    """All curves that the metric rows, by service, have numbers for."""
    found = []
    for plan in PLANS:
        series = [one for line in plan.lines for one in _series(line, rows.get(line.service, ()))]
        if series:
            found.append(Chart(plan.id, plan.title, plan.hint, series))
    return found


def metric_names(rows: Mapping[str, Sequence[MetricRow]]) -> list[str]:
    """Every metric that has a row, as `service: key`, sorted."""
    return sorted({f"{service}: {key}" for service, own in rows.items() for row in own for key in row} - _COORDINATES)


def one_metric(rows: Mapping[str, Sequence[MetricRow]], name: str) -> Series:
    """The curve of a metric by its `service: key`; without points if there is no such metric."""
    service, _, key = name.partition(": ")
    return _column(name, key, "", rows.get(service, ()))


def names_in(key: str, rows: Sequence[MetricRow]) -> list[str]:
    """What stands for `{env}` in the keys that look like `key`: `all` first, if there are several."""
    before, _, after = key.partition(ENV)
    pattern = re.compile(re.escape(before) + "(.+)" + re.escape(after))
    known: set[str] = set().union(*rows)
    names = sorted({found[1] for name in known if (found := pattern.fullmatch(name))})
    single = [name for name in names if name != ALL]
    return single if len(single) == 1 else [*([ALL] if ALL in names else []), *single]


def _series(line: _Line, rows: Sequence[MetricRow]) -> list[Series]:
    if ENV not in line.key:
        keys = {line.label: line.key}
    else:
        keys = {name: line.key.replace(ENV, name) for name in names_in(line.key, rows)}
    found = [_column(label, key, line.over, rows) for label, key in keys.items()]
    return [series for series in found if series.steps]


def _column(label: str, key: str, over: str, rows: Sequence[MetricRow]) -> Series:
    points: dict[float, float] = {}
    for row in rows:  # a step that was trained again after a crash has a second row, which wins
        step, value = row.get("step"), row.get(key)
        divisor = row.get(over) if over else 1.0
        if step is not None and value is not None and divisor:
            points[step] = min(value / divisor, 1.0) if over else value
    ordered = sorted(points.items())
    return Series(label, *_thinned([step for step, _ in ordered], [value for _, value in ordered]))


def _thinned(steps: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """At most `MAX_POINTS` means of neighbours, each at its last step."""
    width = -(-len(steps) // MAX_POINTS)
    if width <= 1:
        return steps, values
    ends = range(width, len(steps) + width, width)
    chunks = [values[end - width : end] for end in ends]
    return [steps[min(end, len(steps)) - 1] for end in ends], [sum(chunk) / len(chunk) for chunk in chunks]
