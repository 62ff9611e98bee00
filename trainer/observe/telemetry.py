"""`Telemetry`: what people see of a step. One log line and one row of metrics, both from the first rank."""

import functools
import operator
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from loguru import logger

from runtime.health.health import Health
from runtime.metrics.metric_log import MetricLog
from trainer.step.report import StepReport, TrainProgress
from transport.wire.manifest import BatchManifest


class Telemetry:
    """Times the phases of a step and reports it. `metrics` is `None` on all ranks but the first."""

    def __init__(self, health: Health, metrics: MetricLog | None) -> None:
        self._health = health
        self._metrics = metrics
        self._seconds: dict[str, float] = {}
        self._last_step_at = time.monotonic()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of the block to `phase` of this step, and show the phase in `/health`."""
        self._health.set_facts(phase=phase)
        self._health.progress()
        started = time.monotonic()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - started
        self._health.set_facts(phase="")

    def step(self, batch: BatchManifest, reports: Sequence[StepReport], progress: TrainProgress, rate: float) -> None:
        """Report step `batch.step`. The time of its checkpoint counts for the next one."""
        self._health.progress(step=progress.step, version=progress.step, num_tokens=progress.num_tokens)
        now = time.monotonic()
        total_s, self._last_step_at = now - self._last_step_at, now
        seconds, self._seconds = self._seconds, {}
        if self._metrics is None:
            return
        values = merge_metrics(reports) | staleness(batch) | step_times(seconds, total_s)
        values["tokens_per_s"] = values["tokens/global"] / max(total_s, 1e-9)
        values["lr"] = rate
        values["progress/samples"] = progress.num_samples
        values["progress/tokens"] = progress.num_tokens
        values["non_finite"] = progress.num_non_finite
        self._metrics.log(batch.step, values)
        logger.info(step_line(batch.step, values))


def merge_metrics(reports: Sequence[StepReport]) -> dict[str, float]:
    """The metrics of a batch from those of its optimizer steps.

    Counts add up, maxima stay, and those by env come from the added sums, so that every token counts alike; the rest
    is averaged.
    """
    if len(reports) == 1:
        return dict(reports[0].metrics)
    merged: dict[str, float] = {}
    for key in dict.fromkeys(key for report in reports for key in report.metrics):
        values = [report.metrics[key] for report in reports if key in report.metrics]
        if key.endswith(("/local", "/global")):
            merged[key] = sum(values)
        elif key.endswith("/max"):
            merged[key] = max(values)
        else:
            merged[key] = sum(values) / len(values)
    totals = [report.env_totals for report in reports if report.env_totals is not None]
    return merged | (functools.reduce(operator.add, totals).metrics() if totals else {})


def staleness(batch: BatchManifest) -> dict[str, float]:
    """Versions between the one that is trained and the oldest that sampled a token, over the samples of a policy."""
    oldest = batch.columns.oldest_versions.numpy()
    ages = (batch.step - 1) - oldest[oldest >= 0]
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())} if ages.size else {}


def step_times(seconds: dict[str, float], total_s: float) -> dict[str, float]:
    """`time/<phase>_s`; what no phase accounts for was mostly spent waiting for the batch."""
    times = {f"time/{phase}_s": duration for phase, duration in seconds.items()}
    return times | {"time/step_s": total_s, "time/wait_s": max(total_s - sum(seconds.values()), 0.0)}


def step_line(step: int, values: dict[str, float]) -> str:
    """The line that the log has for a step."""
    parts = [f"step {step:>4}", f"loss {values['loss']:+.4f}"]
    if "reward/all/mean" in values:
        parts.append(f"reward {values['reward/all/mean']:.3f}")
    parts.append(f"grad {values['grad_norm']:.3f}")
    if "mismatch_kl/all/mean" in values:
        parts.append(f"kl {values['mismatch_kl/all/mean']:.2e}")
    if "staleness/max" in values:
        parts.append(f"stale {values['staleness/max']:.0f}")
    parts.append(f"{values['tokens_per_s']:,.0f} tok/s")
    parts.append(f"{values['time/step_s']:.2f} s ({values['time/wait_s']:.2f} waiting)")
    return " | ".join(parts)
