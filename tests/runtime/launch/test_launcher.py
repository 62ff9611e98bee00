"""`rl` with fake services: real processes, real signals, and never an orphan."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.launch.launcher import describe_exit
from runtime.process.guardian import COOKIE_VARIABLE, end_marked, marked_processes
from runtime.run_dir.run_dir import RunDir, ServiceInfo
from tests.runtime.launch.fake_services import END_FLAG, MODULE, SLEEPER
from tests.support.metrics import read_metrics
from tests.support.process import Process
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
TEST_VARIABLE = "TANDEM_TEST"

pytestmark = pytest.mark.integration


class Rl:
    """One `rl` with fake services, its run directory, and every process that descends from it."""

    def __init__(self, tmp_path: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.run_dir = RunDir(tmp_path / "runs" / "t")
        self.tmp_path = tmp_path
        (tmp_path / "model").mkdir()

    def start(self, *flags: str, model: str = "model") -> Process:
        """Start `rl`."""
        words = (MODULE, "rl", "--run.name", "t", "--model.path", model, "--no-metrics.tensorboard", *flags)
        settings = {TEST_VARIABLE: self.mark, "PYTHONPATH": str(ROOT)}
        return Process(self.tmp_path / f"{time.monotonic_ns()}.output", *words, cwd=self.tmp_path, **settings)

    def run(self, *flags: str, model: str = "model") -> tuple[int, str]:
        process = self.start(*flags, model=model)
        return process.wait(60), process.output

    def processes(self) -> list[int]:
        """Live descendants, whatever their parent is by now."""
        marker = f"{TEST_VARIABLE}={self.mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if marker in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def command_lines(self) -> list[str]:
        lines = []
        for pid in self.processes():
            try:
                lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return lines


@pytest.fixture
def rl(tmp_path: Path) -> Iterator[Rl]:
    rl = Rl(tmp_path)
    yield rl
    left = rl.processes()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == [], "rl left processes behind"


def test_run_to_the_end_says_where_everything_is(rl: Rl) -> None:
    code, output = rl.run("--max-steps", "12")
    assert code == 0
    steps = [line for line in output.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == [f"{step}/12" for step in range(1, 13)]
    assert "Run t finished after" in output
    assert "reward         0.250 → 0.833" in output
    assert "trainer      | " in output
    assert len(read_metrics(rl.run_dir.metrics / "trainer.jsonl")) == 12
    assert "trainer ends" in (rl.run_dir.logs / "trainer.out").read_text()
    assert rl.run_dir.read_services() == {}


def test_dying_service_stops_the_others_and_shows_its_last_lines(rl: Rl) -> None:
    code, output = rl.run("--inference.behaviour", "die", "--max-steps", "100000")
    assert code == 3
    assert "rl           | inference died with exit code 3; its last lines:" in output
    assert "rl           |   " in output
    assert "out of memory, or so" in output
    assert "rl: inference died with exit code 3; its output is in runs/t/logs/inference.out\n" in output
    assert "orchestrator ends" in output
    assert "trainer ends" in output
    assert "Traceback" not in output


def test_mistake_of_the_user_keeps_its_exit_code(rl: Rl) -> None:
    code, output = rl.run("--orchestrator.behaviour", "refuse", "--max-steps", "100000")
    assert code == 2
    assert "\nrl: orchestrator: port 8000 is in use\n" in output
    assert "its last lines" not in output


def test_killed_service_is_named_with_its_signal(rl: Rl) -> None:
    process = rl.start("--max-steps", "100000")
    until(lambda: "inference" in rl.run_dir.read_services())
    os.kill(rl.run_dir.read_services()["inference"].pid, signal.SIGKILL)
    assert process.wait(30) == 137
    output = process.output
    assert "rl: inference was killed by SIGKILL" in output


def test_service_that_lost_its_peer_is_not_the_culprit(rl: Rl) -> None:
    flags = ["--inference.behaviour", "die", "--inference.delay-s", "0.3", "--orchestrator.behaviour", "die_of_peer"]
    code, output = rl.run(*flags, "--trainer.behaviour", "ignore_sigterm", "--grace-s", "0.5")
    assert code == 3
    assert "rl: inference died with exit code 3" in output


def test_server_that_ends_too_early_is_a_failure(rl: Rl) -> None:
    code, output = rl.run("--inference.behaviour", "exit_zero", "--max-steps", "100000")
    assert code == 1
    assert "rl: inference ended too early" in output


def test_service_that_never_gets_healthy_is_named_at_the_deadline(rl: Rl) -> None:
    flags = ["--orchestrator.behaviour", "never_ready", "--start-timeout-s", "6", "--max-steps", "100000"]
    code, output = rl.run(*flags)
    assert code == 75
    assert "rl: orchestrator did not become healthy within 6 s" in output


def test_service_that_does_not_end_with_the_others_is_named(rl: Rl) -> None:
    flags = ["--orchestrator.behaviour", "stray", END_FLAG, "1", "--max-steps", "3"]
    code, output = rl.run(*flags)
    assert code == 75
    assert "rl: orchestrator did not end after the others had within 1 s" in output


def test_service_that_ignores_sigterm_is_killed(rl: Rl) -> None:
    flags = ["--trainer.behaviour", "ignore_sigterm", "--grace-s", "0.5", "--orchestrator.behaviour", "die"]
    code, output = rl.run(*flags)
    assert code == 3
    assert "rl           | trainer did not end within 0.5 s: killed" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_all_services_gracefully(rl: Rl, number: signal.Signals) -> None:
    process = rl.start("--max-steps", "100000")
    until(lambda: len(rl.run_dir.read_services()) == 3)
    assert process.stop(number, 30) == 0
    output = process.output
    for service in ("inference", "orchestrator", "trainer"):
        assert f"{service} ends" in output
    assert "Run t stopped (the same command continues it)" in output


def test_second_signal_ends_rl_at_once_and_leaves_nothing(rl: Rl) -> None:
    process = rl.start("--trainer.behaviour", "ignore_sigterm", "--grace-s", "3", "--max-steps", "100000")
    until(lambda: len(rl.run_dir.read_services()) == 3)
    process.send(signal.SIGINT)
    process.send(signal.SIGTERM)
    assert process.wait(10) in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    until(lambda: rl.processes() == [])


def test_killed_rl_leaves_no_orphans(rl: Rl) -> None:
    flags = ["--trainer.behaviour", "stray", "--inference.behaviour", "ignore_sigterm", "--grace-s", "0.5"]
    process = rl.start(*flags, "--orchestrator.max-steps", "100000")
    until(lambda: any(SLEEPER in line for line in rl.command_lines()))
    until(lambda: len(rl.run_dir.read_services()) == 3)
    process.stop(signal.SIGKILL, 10)
    until(lambda: rl.processes() == [])


def test_stray_grandchild_in_its_own_session_is_ended(rl: Rl) -> None:
    flags = ["--trainer.behaviour", "stray", "--inference.behaviour", "die", "--inference.delay-s", "1"]
    code, _ = rl.run(*flags, "--grace-s", "1")
    assert code == 3


def test_second_rl_on_the_same_run_is_refused(rl: Rl) -> None:
    process = rl.start("--max-steps", "100000")
    until(lambda: len(rl.run_dir.read_services()) == 3)
    try:
        code, output = rl.run("--max-steps", "100000")
        assert code == 2
        assert f"rl: rl already runs in runs/t (pid {process.pid} on host" in output
    finally:
        process.stop(within_s=30)


def test_announcement_of_a_service_that_runs_already_stays(rl: Rl) -> None:
    """Started by hand, say: its own is refused, and it stays to be found."""
    rl.run_dir.create()
    with rl.run_dir.lock("orchestrator"):
        rl.run_dir.announce("orchestrator", ServiceInfo())
        code, output = rl.run("--max-steps", "3")
        assert code == 2, output
        assert f"orchestrator already runs in runs/t (pid {os.getpid()} on host" in output
        assert rl.run_dir.read_services() == {"orchestrator": ServiceInfo()}


def test_stale_announcement_of_a_killed_run_is_not_believed(rl: Rl) -> None:
    rl.run_dir.create()
    (rl.run_dir.services / "orchestrator.json").write_text(
        '{"pid": 1, "host": "h", "health_url": "http://127.0.0.1:1/"}'
    )
    code, _ = rl.run("--max-steps", "3")
    assert code == 0


def test_missing_model_is_one_line(rl: Rl) -> None:
    code, output = rl.run(model="nowhere")
    assert (code, output) == (2, "rl: model.path = nowhere does not exist, and `prepare` is not set to make it\n")


def test_prepare_makes_the_model_first(rl: Rl) -> None:
    program = "import pathlib; pathlib.Path('made').mkdir(); print('made it')"
    code, output = rl.run("--max-steps", "3", "--prepare", f'["python", "-c", "{program}"]', model="made")
    assert code == 0
    assert "prepare      | made it" in output
    assert (rl.tmp_path / "made").is_dir()


def test_failing_prepare_ends_rl_before_any_service_starts(rl: Rl) -> None:
    code, output = rl.run("--prepare", '["python", "-c", "raise SystemExit(9)"]', model="made")
    assert code == 9
    assert "rl: prepare died with exit code 9" in output
    assert "trainer" not in output


def test_dry_run_starts_nothing(rl: Rl) -> None:
    code, output = rl.run("--dry-run", "--max-steps", "5")
    assert code == 0
    assert '"max_steps": 5' in output
    assert not (rl.run_dir.path / "logs" / "trainer.out").exists()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "ended too early"),
        (2, "died with exit code 2 (usage)"),
        (3, "died with exit code 3"),
        (75, "died with exit code 75 (stalled)"),
        (137, "was killed by SIGKILL"),
        (255, "died with exit code 255"),
    ],
)
def test_exit_codes_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_only_marked_processes_are_ended() -> None:
    cookie = uuid.uuid4().hex
    marked = subprocess.Popen([sys.executable, "-c", SLEEPER], env=os.environ | {COOKIE_VARIABLE: cookie})
    other = subprocess.Popen([sys.executable, "-c", SLEEPER], env=os.environ | {COOKIE_VARIABLE: cookie + "x"})
    try:
        until(lambda: marked_processes(cookie) == [marked.pid])
        assert end_marked(cookie, grace_s=5) == 1
        assert marked.wait(timeout=5) == -signal.SIGTERM
        assert other.poll() is None
    finally:
        for process in (marked, other):
            process.kill()
            process.wait()
