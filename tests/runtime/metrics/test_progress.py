"""Progress as a value, and how it looks."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from runtime.config.config import MetricsConfig
from runtime.health.health import Health
from runtime.health.server import HealthServer
from runtime.launch.progress_view import LiveView, PlainView, command, make_view, newest_checkpoint, summarize
from runtime.launch.run_monitor import RunMonitor
from runtime.metrics.metric_log import MetricLog
from runtime.metrics.progress import RunProgress, advance, plain_line, reward_change, sparkline
from runtime.run_dir.run_dir import RunDir, ServiceInfo
from tests.support.waiting import until

EMPTY = RunProgress(main_service="trainer", max_steps=10)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "demo").create()


def test_main_service_counts_the_steps() -> None:
    progress = advance(EMPTY, "orchestrator", {"step": 3, "reward/all/mean": 0.5})
    assert (progress.step, progress.rewards) == (0, {3: 0.5})
    progress = advance(progress, "trainer", {"step": 2, "tokens_per_s": 100.0, "staleness/max": 1.0})
    assert (progress.step, progress.tokens_per_s, progress.staleness) == (2, 100.0, 1.0)


@pytest.mark.parametrize("order", [["orchestrator", "trainer"], ["trainer", "orchestrator"]])
def test_reward_of_the_orchestrator_wins_over_that_of_the_trainer(order: list[str]) -> None:
    rows = {"orchestrator": {"step": 1, "reward/all/mean": 0.2}, "trainer": {"step": 1, "reward/all/mean": 0.5}}
    progress = EMPTY
    for service in order:
        progress = advance(progress, service, rows[service])
    assert progress.rewards == {1: 0.2}


def test_reward_is_that_of_the_step_not_of_a_batch_that_waits() -> None:
    progress = replace(EMPTY, step=3, rewards={3: 0.25, 4: 0.5, 5: 0.75})
    assert progress.reward == 0.25
    assert replace(progress, step=6).reward is None


def test_null_reward_is_left_out() -> None:
    assert advance(EMPTY, "orchestrator", {"step": 1, "reward/all/mean": None}).rewards == {}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([0.5], "▁"),
        ([1.0, 1.0, 1.0], "▁▁▁"),
        ([0.0, 0.5, 1.0], "▁▅█"),
        ([0.0] * 40 + [1.0] * 40, "▁▁██"),
    ],
)
def test_sparkline(values: list[float], expected: str) -> None:
    assert sparkline(values, width=4) == expected


@pytest.mark.parametrize("count", [1, 39, 40, 41, 100, 1000])
def test_sparkline_is_never_wider_than_asked(count: int) -> None:
    assert len(sparkline([float(index) for index in range(count)])) == min(count, 40)


def test_plain_line_leaves_out_what_nobody_measured() -> None:
    assert plain_line(EMPTY) == "step 0/10"
    full = replace(EMPTY, step=3, rewards={3: 0.25}, tokens_per_s=1234.5, staleness=1.0)
    assert plain_line(full) == "step 3/10  reward 0.250  1234 tokens/s  staleness 1"


def test_reward_change_takes_the_mean_of_both_ends() -> None:
    assert reward_change({}) is None
    assert reward_change({step: step / 20 for step in range(1, 21)}) == pytest.approx((0.15, 0.9))


def test_plain_view_prints_each_step_once() -> None:
    out = StringIO()
    with PlainView(Console(file=out)) as view:
        view.forward("trainer", "[bold]not markup[/bold]")
        view.update(EMPTY)
        view.update(replace(EMPTY, step=1))
        view.update(replace(EMPTY, step=1))
        view.update(replace(EMPTY, step=2))
    assert out.getvalue().splitlines() == ["trainer      | [bold]not markup[/bold]", "step 1/10", "step 2/10"]


def test_live_view_shows_curve_and_waits_below_the_log() -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with LiveView(console) as view:
        view.forward("trainer", "[bold]not markup[/bold]")
        view.update(replace(EMPTY, step=5, rewards={1: 0.0, 2: 1.0}, waits={"trainer": "batch 6"}))
    text = out.getvalue()
    assert "[bold]not markup[/bold]" in text
    assert "step 5/10" in text
    assert "▁█" in text
    assert "trainer ← batch 6" in text


def test_view_depends_on_the_terminal() -> None:
    assert isinstance(make_view(Console(file=StringIO())), PlainView)
    assert isinstance(make_view(Console(file=StringIO(), force_terminal=True)), LiveView)


def test_monitor_returns_every_step_but_not_the_history(run_dir: RunDir) -> None:
    (run_dir.metrics / "trainer.jsonl").write_text('{"step": 1, "time": 5.0, "reward/all/mean": 0.5}\n')
    monitor = RunMonitor(run_dir, ["orchestrator", "trainer"], max_steps=9)
    log = MetricLog("trainer", run_dir, MetricsConfig(tensorboard=False))
    log.log(2, {"loss": 1.0})
    log.log(3, {"loss": 1.0})
    assert [progress.step for progress in monitor.poll()] == [2, 3, 3]
    assert monitor.progress.rewards == {1: 0.5}
    assert [progress.step for progress in monitor.poll()] == [3]


def test_a_service_of_the_run_before_says_nothing_about_ours(run_dir: RunDir) -> None:
    """It is about to end, and answers until then."""
    names = ("trainer", "orchestrator")
    health = Health("trainer", stall_timeout_s=60)
    health.ready()
    server = HealthServer(health, host="127.0.0.1", port=0)
    before = ServiceInfo(health_url=server.url, pid=1)
    for name in names:
        run_dir.announce(name, before)
    monitor = RunMonitor(run_dir, names, max_steps=None)
    monitor.health.start(run_dir.read_services())
    try:
        run_dir.announce("orchestrator", ServiceInfo(health_url=server.url, pid=2))
        until(lambda: monitor.health.is_ready("orchestrator"))  # the trainer was asked before it
        assert not monitor.health.is_ready("trainer")
        run_dir.announce("trainer", ServiceInfo(health_url=server.url, pid=3))
        until(lambda: monitor.health.is_ready("trainer"))
    finally:
        monitor.health.stop()
        server.close()


def test_monitor_says_who_waits_for_what(run_dir: RunDir) -> None:
    health = Health("trainer", stall_timeout_s=60)
    server = HealthServer(health, host="127.0.0.1", port=0)
    monitor = RunMonitor(run_dir, ["trainer"], max_steps=None)
    monitor.health.start()
    try:
        run_dir.announce("trainer", ServiceInfo(health_url=server.url))
        health.waiting_for("batch 7")
        until(lambda: monitor.poll()[-1].waits == {"trainer": "batch 7"})
        assert not monitor.health.is_ready("trainer")
        health.ready()
        health.waiting_for("")
        until(lambda: monitor.health.is_ready("trainer") and monitor.poll()[-1].waits == {})
        health.waiting_for("batch 8")
        until(lambda: monitor.poll()[-1].waits == {"trainer": "batch 8"})
        run_dir.withdraw("trainer")  # it ended: it waits for nothing, but it was ready once
        until(lambda: monitor.poll()[-1].waits == {})
        assert monitor.health.is_ready("trainer")
    finally:
        monitor.health.stop()
        server.close()


def test_summary_says_where_everything_is(run_dir: RunDir) -> None:
    for step in (25, 100):
        (run_dir.checkpoints / f"step-{step:08}").mkdir()
    (run_dir.checkpoints / "step-00000025" / "manifest.json").write_text("{}")
    progress = replace(EMPTY, step=10, rewards={1: 0.2, 10: 0.9})
    text = summarize(run_dir, progress, seconds=125, finished=True)
    assert "Run demo finished after 2 min 5 s, step 10" in text
    assert f"trainer export --checkpoint {run_dir.checkpoints}/step-00000025 --out" in text
    assert "look at them" not in text
    assert f"{run_dir.metrics}/*.jsonl" in text


def test_commands_outside_the_path_are_given_with_theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / ".venv" / "bin" / "trainer"
    script.parent.mkdir(parents=True)
    script.write_text("")
    monkeypatch.setattr("sys.executable", str(script.with_name("python")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert command("trainer") == str(script)
    monkeypatch.chdir(tmp_path)
    assert command("trainer") == ".venv/bin/trainer"
    assert command("unknown") == "unknown"


def test_summary_of_a_stopped_run_without_anything(run_dir: RunDir) -> None:
    text = summarize(run_dir, EMPTY, seconds=3, finished=False)
    assert "stopped (the same command continues it) after 3 s" in text
    assert "checkpoint" not in text
    assert "reward" not in text
    assert newest_checkpoint(run_dir) is None
