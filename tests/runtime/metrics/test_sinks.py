"""Experiment trackers: what they get, and that none can stop a run. wandb is real (offline), trackio a fake."""

import math
import sys
import types
from pathlib import Path

import pytest

from runtime.config.config import MetricsConfig, TrackioConfig, WandbConfig
from runtime.metrics.metric_log import MetricLog
from runtime.run_dir.run_dir import RunDir
from tests.support.metrics import read_metrics

WANDB = MetricsConfig(tensorboard=False, wandb=WandbConfig(project="tests", mode="offline"))
TRACKIO = MetricsConfig(tensorboard=False, trackio=TrackioConfig(project="tests"))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "my-run").create()


class FakeTrackio(types.ModuleType):
    """`init`, `Run.log` and `Run.finish` of trackio 0.43."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("trackio")
        self.error = error
        self.arguments: dict[str, object] = {}
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.finished = 0

    def init(self, **arguments: object) -> "FakeTrackio":
        self.arguments = arguments
        return self

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.error is not None:
            raise self.error
        self.rows.append((step, metrics))

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.filterwarnings("ignore")  # wandb's own
def test_wandb_writes_an_offline_run(run_dir: RunDir, warnings_seen: list[str]) -> None:
    log = MetricLog("trainer", run_dir, WANDB)
    log.log(1, {"loss": 0.5, "bad": math.nan})
    log.close()
    assert warnings_seen == []
    (record,) = (run_dir.metrics / "wandb").glob("offline-run-*/run-my-run-trainer.wandb")
    assert record.stat().st_size > 0


def test_trackio_gets_the_finite_numbers_of_each_step(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")
    log = MetricLog("trainer", run_dir, TRACKIO)
    log.log(1, {"loss": 0.5, "bad": math.nan})
    log.close()
    log.close()
    assert (module.arguments["project"], module.arguments["group"]) == ("tests", "my-run")
    assert module.rows == [(1, {"loss": 0.5})]
    assert module.finished == 1


def test_tracker_that_raises_costs_one_warning_and_no_line_of_json(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, warnings_seen: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", FakeTrackio(RuntimeError("the server is away")))
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")
    log = MetricLog("trainer", run_dir, TRACKIO)
    for step in (1, 2):
        log.log(step, {"loss": 0.5})
    log.close()
    (warning,) = warnings_seen
    assert "the server is away" in warning
    assert [row["step"] for row in read_metrics(run_dir.metrics / "trainer.jsonl")] == [1, 2]


def test_tracker_that_is_not_installed_costs_one_warning(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, warnings_seen: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")
    MetricLog("trainer", run_dir, TRACKIO).close()
    (warning,) = warnings_seen
    assert "extra `trackio`" in warning


def test_what_belongs_to_an_earlier_step_is_not_thrown_away_by_the_tracker(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")
    log = MetricLog("orchestrator", run_dir, TRACKIO)
    log.log(7, {"reward/all/mean": 0.5})
    log.log(5, {"eval_reward/exam/mean": 0.75})
    log.log(8, {"reward/all/mean": 0.6})
    log.close()
    late = {"eval_reward/exam/mean": 0.75, "logged_for_step": 5.0}
    assert module.rows == [(7, {"reward/all/mean": 0.5}), (7, late), (8, {"reward/all/mean": 0.6})]
    assert [row["step"] for row in read_metrics(run_dir.metrics / "orchestrator.jsonl")] == [7, 5, 8]
