"""`rl doctor` on real processes, alive, frozen and dead."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from runtime.cli import run
from runtime.doctor.diagnosis import Condition, diagnose
from runtime.doctor.evidence import Evidence, Life, ServiceEvidence, find_life, gather_evidence
from runtime.doctor.view import as_json, render
from runtime.errors import StorageError, UserError
from runtime.health.health import ask_health
from runtime.run_dir.run_dir import RunDir, ServiceInfo
from runtime.run_dir.service_lock import Holder, describe_end, read_holder
from tests.support.waiting import until

# A service that says what it waits for, until it is killed; with a last argument it ends at once, by an error.
SERVICE = """
import sys, time
from pathlib import Path
from loguru import logger
from runtime.config.config import LogConfig
from runtime.errors import PeerLostError
from runtime.health.health import Health
from runtime.health.server import HealthServer
from runtime.process.logging import setup_logging
from runtime.run_dir.run_dir import RunDir
from runtime.run_dir.run_dir import ServiceInfo
name, waits, peer, detail, end = sys.argv[2:]
run_dir = RunDir(Path(sys.argv[1]))
setup_logging(name, LogConfig(), run_dir)
with run_dir.lock(name):
    if end:
        raise PeerLostError(end)
    health = Health(name, stall_timeout_s=60)
    health.ready()
    health.progress(step=3)
    health.waiting_for(waits, peer=peer, detail=detail)
    server = HealthServer(health, host="127.0.0.1", port=0)
    run_dir.announce(name, ServiceInfo(health_url=server.url))
    logger.info("works")
    print("up", flush=True)
    time.sleep(600)
"""

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


@pytest.fixture
def start(run_dir: RunDir) -> Iterator[Start]:
    """`start(name, waits)`: a service that is up; `start(name, end=reason)`: one that is gone again."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(name: str, waits: str = "", peer: str = "", detail: str = "", end: str = "") -> "subprocess.Popen[bytes]":
        arguments = [sys.executable, "-c", SERVICE, str(run_dir.path), name, waits, peer, detail, end]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == (b"" if end else b"up\n")
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def condition(run_dir: RunDir, name: str) -> Condition:
    return diagnose(gather_evidence(run_dir, timeout_s=1.0)).conditions[name]


def test_live_services_are_asked(run_dir: RunDir, start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    orchestrator = start("orchestrator", "policy version 4 from the trainer", "trainer")
    start("trainer")
    assert run(["doctor", str(run_dir.path)]) == 0
    shown = capsys.readouterr().out
    assert f"pid {orchestrator.pid} on" in shown
    assert "orchestrator ── policy version 4 from the trainer ──▶ trainer" in shown
    assert "orchestrator waits for policy version 4 from the trainer; trainer works" in shown
    assert "step 3" in shown


def test_killed_service_is_dead_and_its_last_lines_are_shown(
    run_dir: RunDir, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start("orchestrator", "policy version 4 from the trainer", "trainer")
    trainer = start("trainer")
    trainer.kill()
    trainer.wait()
    assert run(["doctor", str(run_dir.path)]) == 1
    shown = capsys.readouterr().out
    assert "trainer is dead (it left no word; last line of its log:" in shown
    assert "Last lines of trainer" in shown
    assert "works" in shown


def test_frozen_service_is_told_from_a_dead_one(run_dir: RunDir, start: Start) -> None:
    trainer = start("trainer")
    trainer.send_signal(signal.SIGSTOP)  # takes effect when each of its threads has been scheduled
    until(lambda: condition(run_dir, "trainer") is Condition.FROZEN)
    trainer.send_signal(signal.SIGCONT)
    until(lambda: condition(run_dir, "trainer") is Condition.WORKING)


def test_last_words_of_a_service_that_failed_are_kept(run_dir: RunDir, start: Start) -> None:
    start("trainer", end="lost the orchestrator").wait()
    diagnosis = diagnose(gather_evidence(run_dir))
    assert diagnosis.conclusion == "trainer is dead (exit 76: lost the orchestrator)"
    assert diagnosis.culprit == "trainer"


def test_json_holds_everything(run_dir: RunDir, start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = start("trainer", "batch 12 from the orchestrator")
    assert run(["doctor", "--json", str(run_dir.path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["services"]["trainer"]["pid"] == trainer.pid
    assert found["services"]["trainer"]["health"]["step"] == 3
    assert found["services"]["trainer"]["condition"] == "waiting"
    assert found["waits"] == [{"waiter": "trainer", "what": "batch 12 from the orchestrator", "peers": []}]
    assert found["culprit"] is None
    assert found["conclusion"] == "trainer waits for batch 12 from the orchestrator"


def test_looking_does_not_take_the_lock(run_dir: RunDir) -> None:
    with run_dir.lock("trainer"):
        assert gather_evidence(run_dir).services[0].life is Life.RUNNING
    gather_evidence(run_dir)
    run_dir.lock("trainer").release()


def test_pid_that_another_process_got_is_not_the_service(run_dir: RunDir) -> None:
    path = run_dir.services / "trainer.lock"
    path.write_text("")
    assert find_life(Holder(pid=os.getpid(), host=os.uname().nodename), path) is Life.GONE


def test_service_of_another_host_can_only_be_asked(run_dir: RunDir) -> None:
    assert find_life(Holder(pid=1, host="elsewhere"), run_dir.services / "trainer.lock") is Life.UNKNOWN
    assert find_life(Holder(pid=1, host="elsewhere", ended="exit 0"), run_dir.services / "x.lock") is Life.GONE
    assert find_life(None, run_dir.services / "trainer.lock") is Life.GONE


def test_announced_service_without_a_lock_is_examined_too(run_dir: RunDir) -> None:
    info = ServiceInfo(host="elsewhere", health_url="http://127.0.0.1:1/health", addresses={"b": "tcp://10.0.0.1:5"})
    run_dir.announce("orchestrator", info)
    (found,) = gather_evidence(run_dir).services
    assert found.addresses == ("127.0.0.1:1", "10.0.0.1:5")
    assert found.problem == "http://127.0.0.1:1/health: Connection refused"


def test_endpoint_that_never_answers_costs_only_the_timeout() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/health"
        assert ask_health(url, 0.2) == ({}, f"{url}: no answer in time")


@pytest.mark.parametrize("argv", [[], ["--json"], ["a", "b"], ["--verbose"]])
def test_wrong_use_is_explained(argv: list[str]) -> None:
    with pytest.raises(UserError, match="usage: rl doctor RUN_DIRECTORY"):
        run(["doctor", *argv])


def test_folder_that_is_no_run_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        run(["doctor", str(tmp_path)])


def test_run_without_services_says_so(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(run_dir.path)]) == 0
    shown = capsys.readouterr().out
    assert "no service was ever started" in shown
    assert "no service says that it waits" in shown


def test_words_of_others_are_neither_markup_nor_obeyed() -> None:
    words = "exit 1: cannot read [/data/x] [red]\x1b]0;title\x07"
    facts = {"engines": "refused [/data/y]\x1b[2J"}
    service = ServiceEvidence("trainer", Life.GONE, ended=words, health=facts, last_lines=(words,))
    evidence = Evidence("runs/[bold]", (service,), {"checkpoint": "[/z]\x1b[1m"})
    out = io.StringIO()
    Console(file=out, width=200, highlight=False).print(render(evidence, diagnose(evidence)))
    assert "\x1b" not in out.getvalue()
    for text in ("runs/[bold]", "[/data/x] [red]\\x1b]0;title\\x07", "[/data/y]", "[/z]"):
        assert text in out.getvalue()


def test_json_of_values_that_are_not_plain_is_possible() -> None:
    evidence = Evidence("runs/x", (ServiceEvidence("trainer", Life.GONE),), {"last trained step": "3"})
    assert json.loads(json.dumps(as_json(evidence, diagnose(evidence))))["positions"] == {"last trained step": "3"}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, "exit 0"),
        (SystemExit(3), "exit 3"),
        (StorageError("no\nspace"), "exit 74: no space"),
        (ExceptionGroup("g", [StorageError("full")]), "exit 74: full"),
        (ValueError("x"), "exit 1: ValueError('x')"),
    ],
)
def test_how_a_process_ended_is_one_line(error: BaseException | None, expected: str) -> None:
    assert describe_end(error) == expected


def test_lock_tells_who_has_it_and_later_how_it_ended(run_dir: RunDir) -> None:
    path = run_dir.services / "trainer.lock"
    assert read_holder(path) is None
    with run_dir.lock("trainer"):
        assert read_holder(path) == Holder(pid=os.getpid(), host=os.uname().nodename)
    assert read_holder(path) == Holder(pid=os.getpid(), host=os.uname().nodename, ended="exit 0")


def test_long_waits_are_shown_whole_and_told_in_brief(
    run_dir: RunDir, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    details = "http://127.0.0.1:8000/health did not answer: " + "refused " * 12
    start("orchestrator", "policy: the trainer to publish", "trainer", f"{details}(again)")
    start("trainer")
    assert run(["doctor", str(run_dir.path)]) == 0
    shown = capsys.readouterr().out
    assert f"└── orchestrator ── policy: the trainer to publish ({details}(again)) ──▶ trainer\n" in shown
    assert "orchestrator waits for policy: the trainer to publish (...); trainer works" in shown
