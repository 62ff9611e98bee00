import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from runtime.health.health import Health
from tests.trainer.shell.recorded import make_batch
from trainer.accounting.env_stats import EnvStats
from trainer.batches.source import Batch
from trainer.observe.telemetry import Telemetry, merge_metrics, staleness, step_line, step_times
from trainer.step.report import StepReport, TrainProgress


def report(**metrics: float) -> StepReport:
    return StepReport(True, metrics)


def test_metrics_of_several_optimizer_steps_add_up_average_and_keep_extremes():
    merged = merge_metrics(
        [
            report(**{"tokens/global": 3.0, "loss": 1.0, "micro_batch_tokens/max": 2.0}),
            report(**{"tokens/global": 4.0, "loss": 3.0, "micro_batch_tokens/max": 1.5, "ce": 1.0}),
        ]
    )
    assert merged == {"tokens/global": 7.0, "loss": 2.0, "micro_batch_tokens/max": 2.0, "ce": 1.0}


def test_metrics_by_env_of_several_optimizer_steps_count_every_token_alike():
    def step_with(values: list[float]) -> StepReport:
        stats = EnvStats(("ratio",), ("copy",), torch.device("cpu"))
        stats.add("ratio", torch.tensor(values), torch.zeros(len(values), dtype=torch.int64))
        return replace(report(**stats.totals().metrics()), env_totals=stats.totals())

    merged = merge_metrics([step_with([1.0]), step_with([3.0, 4.0, 8.0])])
    assert merged["ratio/copy/mean"] == merged["ratio/all/mean"] == 4.0
    assert (merged["ratio/copy/min"], merged["ratio/copy/max"]) == (1.0, 8.0)
    assert merged["ratio/copy/std"] == pytest.approx(np.std([1, 3, 4, 8]))


def test_metrics_of_one_optimizer_step_are_not_changed():
    assert merge_metrics([report(loss=1.0)]) == {"loss": 1.0}


@pytest.mark.parametrize(("trained_at", "age"), [(3, 0.0), (5, 2.0)])
def test_staleness_is_counted_from_the_version_that_is_trained(trained_at, age):
    sampled_by_version_2 = make_batch("run", 3).manifest
    batch = Batch(msgspec.structs.replace(sampled_by_version_2, step=trained_at), source=None)
    assert staleness(batch) == {"staleness/mean": age, "staleness/max": age}


def test_what_no_phase_accounts_for_is_waiting():
    assert step_times({"train": 2.0, "publish": 0.5}, 3.0) == pytest.approx(
        {"time/train_s": 2.0, "time/publish_s": 0.5, "time/step_s": 3.0, "time/wait_s": 0.5}
    )


def test_the_line_of_a_step_leaves_out_what_was_not_measured():
    values = {"loss": -0.5, "grad_norm": 1.25, "tokens_per_s": 12345.6, "time/step_s": 1.0, "time/wait_s": 0.25}
    assert step_line(7, values) == "step    7 | loss -0.5000 | grad 1.250 | 12,346 tok/s | 1.00 s (0.25 waiting)"
    assert "reward 0.500" in step_line(7, values | {"reward/all/mean": 0.5})


def test_a_step_is_progress_and_a_phase_is_visible_in_health():
    health = Health("trainer", 900, clock=time.monotonic)
    telemetry = Telemetry(health, None)
    with telemetry.timed("publish"):
        assert health.report()["phase"] == "publish"
    assert health.report()["phase"] == ""
    telemetry.step(
        Batch(make_batch("run", 1).manifest, source=None), [report()], TrainProgress(step=1, num_tokens=5), 1e-3
    )
    assert (health.report()["step"], health.report()["num_tokens"]) == (1, 5)
