"""Metric sinks: what is written, and that none of them can stop a run.

Experiment trackers: what they get, and that none can stop a run. wandb is real (offline), trackio a stand-in.
"""

import json
import math
import resource
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from runtime.config.config import MetricsConfig, TrackioConfig, WandbConfig
from runtime.metrics.metric_log import JsonlSink, MetricLog, TensorBoardSink
from runtime.metrics.progress import MetricTail
from runtime.run_dir.run_dir import RunDir
from tests.support.metrics import read_metrics


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path).create()


def test_jsonl_has_one_object_per_step(run_dir: RunDir) -> None:
    log = MetricLog("trainer", run_dir, MetricsConfig(tensorboard=False))
    log.log(1, {"loss": 0.5})
    log.log(2, {"loss": 0.25, "reward/all/mean": 1})
    rows = read_metrics(run_dir.metrics / "trainer.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["reward/all/mean"] == 1.0
    assert all(row["time"] for row in rows)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_become_null(run_dir: RunDir, value: float) -> None:
    log = MetricLog("trainer", run_dir, MetricsConfig())
    log.log(1, {"loss": value, "lr": 1.0})
    log.close()
    text = (run_dir.metrics / "trainer.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["loss"] is None


def test_torn_line_of_a_killed_process_is_closed_and_skipped(run_dir: RunDir) -> None:
    path = run_dir.metrics / "trainer.jsonl"
    path.write_text('{"step": 1, "time": 1.0}\n{"step": 2, "ti')
    JsonlSink(path).write(2, 2.0, {"loss": 1.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert read_metrics(path)[-1]["loss"] == 1.0


def test_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_tail_returns_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = MetricTail(path)
    assert tail.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert tail.read() == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\nnot json\n[3]\n{"step": "3"}\n{"step": 4}\n')
    assert tail.read() == [{"step": 2}, {"step": 4}]
    assert tail.read() == []


def test_tensorboard_reads_what_we_wrote(run_dir: RunDir) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    log = MetricLog("trainer", run_dir, MetricsConfig())
    log.log(3, {"loss": 0.5, "bad": math.nan})
    log.close()
    (path,) = (run_dir.metrics / "tensorboard" / "trainer").iterdir()
    events = [event for event in LegacyEventFileLoader(str(path)).Load() if event.step]
    assert [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value] == [
        (3, "loss", 0.5)
    ]


def test_tensorboard_files_are_written_without_torch() -> None:
    program = (
        "import sys, tempfile, pathlib\nfrom runtime.metrics.metric_log import TensorBoardSink\n"
        "TensorBoardSink(pathlib.Path(tempfile.mkdtemp())).write(1, 1.0, {'a': 1.0})\n"
        "assert 'torch' not in sys.modules and 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_prometheus_gauges_have_legal_names(run_dir: RunDir) -> None:
    registry = CollectorRegistry()
    log = MetricLog("trainer", run_dir, MetricsConfig(tensorboard=False), registry)
    log.log(4, {"reward/copy-text/mean": 0.5})
    log.log(5, {"reward/copy-text/mean": 0.75})
    text = generate_latest(registry).decode()
    assert "tandem_trainer_reward_copy_text_mean 0.75" in text
    assert "tandem_trainer_step 5.0" in text


def test_full_disk_costs_one_warning_and_the_run_goes_on(run_dir: RunDir, warnings_seen: list[str]) -> None:
    (run_dir.metrics / "trainer.jsonl").symlink_to("/dev/full")
    registry = CollectorRegistry()
    log = MetricLog("trainer", run_dir, MetricsConfig(tensorboard=False), registry)
    for step in range(1, 4):
        log.log(step, {"loss": 1.0})
    log.close()
    assert [text for text in warnings_seen if "jsonl metrics cannot be written" in text] == warnings_seen
    assert len(warnings_seen) == 1
    assert "tandem_trainer_step 3.0" in generate_latest(registry).decode()


def test_tensorboard_on_a_full_disk_costs_one_warning(run_dir: RunDir, warnings_seen: list[str]) -> None:
    (run_dir.metrics / "tensorboard").write_text("in the way")
    log = MetricLog("trainer", run_dir, MetricsConfig())
    log.log(1, {"loss": 1.0})
    assert len(warnings_seen) == 1
    assert len(read_metrics(run_dir.metrics / "trainer.jsonl")) == 1


def test_missing_tensorboard_costs_one_warning(
    run_dir: RunDir, warnings_seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(ImportError):
        TensorBoardSink(run_dir.metrics)
    MetricLog("trainer", run_dir, MetricsConfig()).log(1, {"loss": 1.0})
    (warning,) = warnings_seen
    assert warning.startswith("tensorboard is not installed (extra `torch`)")


def test_a_line_that_a_full_disk_cut_spoils_no_later_one(run_dir: RunDir) -> None:
    log = MetricLog("trainer", run_dir, MetricsConfig(tensorboard=False))
    log.log(1, {"loss": 1.0})
    path = run_dir.metrics / "trainer.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        log.log(2, {"loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.log(3, {"loss": 3.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 3]


def test_several_threads_may_log(run_dir: RunDir) -> None:
    """Steps and evaluations of the orchestrator are logged from different threads."""
    log = MetricLog("orchestrator", run_dir, MetricsConfig(tensorboard=False), CollectorRegistry())
    begin = threading.Barrier(8)

    def work(number: int) -> None:
        begin.wait(60)
        for step in range(20):
            log.log(step, {f"metric/{step}/{key}": float(number) for key in range(20)})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    log.close()
    rows = read_metrics(run_dir.metrics / "orchestrator.jsonl")
    assert sorted(row["step"] for row in rows) == sorted(list(range(20)) * 8)


WANDB = MetricsConfig(tensorboard=False, wandb=WandbConfig(project="tests", mode="offline"))

TRACKIO = MetricsConfig(tensorboard=False, trackio=TrackioConfig(project="tests"))


@pytest.fixture
def named_run_dir(tmp_path: Path) -> RunDir:
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
def test_wandb_writes_an_offline_run(named_run_dir: RunDir, warnings_seen: list[str]) -> None:
    log = MetricLog("trainer", named_run_dir, WANDB)
    log.log(1, {"loss": 0.5, "bad": math.nan})
    log.close()
    assert warnings_seen == []
    (record,) = (named_run_dir.metrics / "wandb").glob("offline-run-*/run-my-run-trainer.wandb")
    assert record.stat().st_size > 0


def test_trackio_gets_the_finite_numbers_of_each_step(named_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")
    log = MetricLog("trainer", named_run_dir, TRACKIO)
    log.log(1, {"loss": 0.5, "bad": math.nan})
    log.close()
    log.close()
    assert (module.arguments["project"], module.arguments["group"]) == ("tests", "my-run")
    assert module.rows == [(1, {"loss": 0.5})]
    assert module.finished == 1


def test_tracker_that_raises_costs_one_warning_and_no_line_of_json(
    named_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, warnings_seen: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", FakeTrackio(RuntimeError("the server is away")))
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")
    log = MetricLog("trainer", named_run_dir, TRACKIO)
    for step in (1, 2):
        log.log(step, {"loss": 0.5})
    log.close()
    (warning,) = warnings_seen
    assert "the server is away" in warning
    assert [row["step"] for row in read_metrics(named_run_dir.metrics / "trainer.jsonl")] == [1, 2]


def test_tracker_that_is_not_installed_costs_one_warning(
    named_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, warnings_seen: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")
    MetricLog("trainer", named_run_dir, TRACKIO).close()
    (warning,) = warnings_seen
    assert "extra `trackio`" in warning


def test_what_belongs_to_an_earlier_step_is_not_thrown_away_by_the_tracker(
    named_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")
    log = MetricLog("orchestrator", named_run_dir, TRACKIO)
    log.log(7, {"reward/all/mean": 0.5})
    log.log(5, {"eval_reward/exam/mean": 0.75})
    log.log(8, {"reward/all/mean": 0.6})
    log.close()
    late = {"eval_reward/exam/mean": 0.75, "logged_for_step": 5.0}
    assert module.rows == [(7, {"reward/all/mean": 0.5}), (7, late), (8, {"reward/all/mean": 0.6})]
    assert [row["step"] for row in read_metrics(named_run_dir.metrics / "orchestrator.jsonl")] == [7, 5, 8]
