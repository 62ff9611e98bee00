"""What an evaluation found: a table for people, and files for programs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from orchestrator.config.eval import EvalEnvConfig
from orchestrator.eval.playing import Outcomes
from orchestrator.eval.stats import eval_metrics
from orchestrator.records.rollout_log import failure_row, rollout_row
from orchestrator.values.rollout import Rollout, RolloutFailure, commonest_failure
from transport.durable import atomic_write

RESULT_NAME = "eval.json"
ROLLOUTS_NAME = "rollouts.jsonl"


@dataclass(frozen=True, slots=True)
class EvalReport:
    """One evaluation. `metrics` are those of an evaluation beside training (`eval/stats.py`)."""

    envs: Sequence[EvalEnvConfig]
    outcomes: Outcomes
    facts: Mapping[str, object]
    """Who was evaluated, and how."""

    @property
    def metrics(self) -> dict[str, float]:
        """`{metric}/{env}/{stat}` of all environments."""
        values: dict[str, float] = {}
        for env in self.envs:
            values |= eval_metrics(env.label, self.outcomes[env.label], env.pass_reward)
        return values

    def error_rate(self, env: EvalEnvConfig) -> float:
        """Share of its rollouts that failed."""
        results = [result for results in self.outcomes[env.label].values() for result in results]
        return sum(isinstance(result, RolloutFailure) for result in results) / len(results)

    def commonest_failure(self, env: EvalEnvConfig) -> str:
        """The reason and message that most of its failed rollouts have; empty if none failed."""
        results = [result for results in self.outcomes[env.label].values() for result in results]
        failures = [result for result in results if isinstance(result, RolloutFailure)]
        if not failures:
            return ""
        commonest, _ = commonest_failure(failures)
        return f"{commonest.reason}: {commonest.message}"

    @property
    def versions(self) -> list[int]:
        """Policy versions that sampled the rollouts; none, where the server does not say."""
        return sorted(
            {
                span.version
                for rollouts in self.outcomes.values()
                for results in rollouts.values()
                for result in results
                if isinstance(result, Rollout)
                for branch in result.branches
                for span in branch.versions
            }
        )


def save_report(report: EvalReport, folder: Path) -> None:
    """Write the figures and the rollouts. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (msgspec.json.encode(row, enc_hook=str) + b"\n" for row in eval_rows(report))
    atomic_write(folder / ROLLOUTS_NAME, b"".join(lines))
    result = {**report.facts, "versions": report.versions, "metrics": report.metrics}
    atomic_write(folder / RESULT_NAME, msgspec.json.format(msgspec.json.encode(result, enc_hook=str), indent=2))


def eval_rows(report: EvalReport) -> Iterator[dict[str, Any]]:
    """One row per rollout, failed ones included."""
    for env in report.envs:
        for example_id, results in report.outcomes[env.label].items():
            for index, result in enumerate(results):
                head = {"env_name": env.label, "example_id": example_id, "index": index}
                yield head | (failure_row(result) if isinstance(result, RolloutFailure) else rollout_row(result))


def report_table(report: EvalReport) -> Table:
    """One row per environment: rollouts, mean with its 95 % interval, pass@k, length."""
    metrics = report.metrics
    powers = max(env.rollouts_per_example for env in report.envs)
    tries = [2**power for power in range(int(math.log2(powers)) + 1)]
    table = Table(title=f"Evaluation of {report.facts.get('model', '?')}")
    for heading in ("env", "examples", "rollouts", "failed", "mean", "95 % interval", *(f"pass@{k}" for k in tries)):
        table.add_column(heading, justify="left" if heading == "env" else "right")
    table.add_column("length", justify="right")
    for env in report.envs:
        mean, margin = metrics.get(f"eval_reward/{env.label}/mean"), metrics.get(f"eval_reward/{env.label}/ci95")
        interval = "-" if mean is None or margin is None else f"{mean - margin:.4f} to {mean + margin:.4f}"
        table.add_row(
            env.label,
            str(len(report.outcomes[env.label])),
            f"{metrics[f'eval_rollouts/{env.label}/finished']:.0f}",
            f"{metrics[f'eval_rollouts/{env.label}/failed']:.0f}",
            _number(mean),
            interval,
            *(_number(metrics.get(f"eval_pass/{env.label}/at_{k}")) for k in tries),
            _number(metrics.get(f"eval_length/{env.label}/mean"), digits=1),
        )
    return table


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
