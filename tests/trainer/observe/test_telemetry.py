"""Metrics and log lines of a step, and what is kept and said of a step that is not finite."""

import json
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from runtime.errors import ExitCode
from runtime.health.health import Health
from tests.trainer.runs import make_batch, make_sample, replay, weight_bytes
from trainer.accounting import Accounting, EnvStats
from trainer.errors import NonFiniteError
from trainer.observe.telemetry import Telemetry, merge_metrics, staleness, step_line, step_times
from trainer.step.report import StepReport, TrainProgress
from transport.durable import write_durably
from transport.outbox.outbox import BatchFile, batch_path, file_chunks
from transport.wire.codec import build_batch


def report(**metrics: float) -> StepReport:
    return StepReport(True, metrics, Accounting.of([]))


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
    batch = msgspec.structs.replace(sampled_by_version_2, step=trained_at)
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
    telemetry.step(make_batch("run", 1).manifest, [report()], TrainProgress(step=1, num_tokens=5), 1e-3)
    assert (health.report()["step"], health.report()["num_tokens"]) == (1, 5)


HOPELESS = 3e38
"""An advantage so large that two of them do not add up to a finite loss."""


def record(folder: Path, bad_steps: set[int], num_steps: int) -> Path:
    for step in range(1, num_steps + 1):
        batch = make_batch("run", step, scale=HOPELESS if step in bad_steps else 1.0)
        write_durably(batch_path(folder, step), file_chunks(batch))
    return folder


def test_a_non_finite_step_changes_no_weight_and_the_run_goes_on(model_path, tmp_path):
    recording = record(tmp_path, {2}, 3)
    run_dir = replay(model_path, recording, tmp_path, "run", "--weights.keep", "4")
    assert weight_bytes(run_dir, 2) == weight_bytes(run_dir, 1)
    assert weight_bytes(run_dir, 3) != weight_bytes(run_dir, 2)


def test_a_step_that_was_skipped_in_part_says_so(model_path, tmp_path):
    """The warning must not say that no weight was changed: the other mini-batch was trained."""
    samples = [make_sample("run", 1, index, scale=1.0 if index < 4 else HOPELESS) for index in range(8)]
    write_durably(batch_path(tmp_path, 1), file_chunks(build_batch("run", 1, samples)))
    run_dir = replay(model_path, tmp_path, tmp_path, "run", "--mini-batches", "2")
    assert "not finite, 1 of 2 optimizer steps skipped (1 in a row" in (run_dir / "logs" / "trainer.log").read_text()
    assert weight_bytes(run_dir, 1) != weight_bytes(run_dir, 0)


def test_the_batch_of_a_non_finite_step_is_kept_byte_for_byte(model_path, tmp_path):
    recording = record(tmp_path, {2}, 3)
    run_dir = replay(model_path, recording, tmp_path, "run")
    kept = list((run_dir / "non_finite").iterdir())
    assert [path.name for path in kept] == ["step-00000002.batch"]
    assert kept[0].read_bytes() == batch_path(recording, 2).read_bytes()
    assert BatchFile(kept[0]).manifest.step == 2


def test_too_many_in_a_row_end_the_run_at_the_last_good_checkpoint(model_path, tmp_path):
    recording = record(tmp_path, {2, 3}, 4)
    flags = ("--max-non-finite-steps", "2", "--checkpoint.interval-steps", "1")
    with pytest.raises(NonFiniteError, match="not finite for 2 steps in a row, up to 3") as raised:
        replay(model_path, recording, tmp_path, "run", *flags)
    assert raised.value.exit_code == ExitCode.NON_FINITE
    assert json.loads((tmp_path / "run" / "checkpoints" / "newest.json").read_text()) == {"step": 2}
    assert not (tmp_path / "run" / "weights" / "v00000003").exists()


def test_the_count_survives_a_restart(model_path, tmp_path):
    recording = record(tmp_path, {2, 3}, 4)
    flags = ("--max-non-finite-steps", "2", "--checkpoint.interval-steps", "1")
    replay(model_path, recording, tmp_path, "run", "--max-steps", "2", *flags)
    with pytest.raises(NonFiniteError, match="up to 3"):
        replay(model_path, recording, tmp_path, "run", *flags)
