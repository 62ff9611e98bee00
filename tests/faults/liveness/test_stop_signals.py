"""Row 24: SIGTERM or Ctrl-C ends every service with exit code 0 in every phase; a second signal ends it at once.

Row 25: a second process of the same service on a run directory or a port is refused in one line, exit code 2.
"""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runtime.errors import ExitCode, UserError
from runtime.run_dir.run_dir import RunDir
from tests.faults.liveness.run import RUN, toy_config, toy_orchestrator, trainer_flags
from tests.orchestrator.toys import write_config
from tests.support.process import Service, service
from trainer.cli import run as run_trainer

pytestmark = pytest.mark.integration

GRACE_S = 30.0
"""What `rl` gives each service (`grace_s`)."""

AT_ONCE_S = 3.0

Sign = Callable[[Service], object]
"""By which a phase is recognized."""


def has_lock(running: Service) -> bool:
    return (running.run_dir.services / f"{running.name}.lock").exists()


def imports_torch(running: Service) -> bool:
    return "libtorch" in Path(f"/proc/{running.pid}/maps").read_text()


def waits_for(what: str) -> Sign:
    return lambda running: what in str(running.health().get("waiting_for"))


def assert_stops(running: Service, sign: Sign, number: int = signal.SIGTERM) -> None:
    running.until(lambda: sign(running))
    running.send(number)
    assert running.wait(within_s=GRACE_S) == 0, running.output
    assert list(running.run_dir.services.glob("*.json")) == [], "its announcement outlived it"


@pytest.mark.parametrize(
    ("sign", "latency_s", "number"),
    [
        (has_lock, 0.0, signal.SIGTERM),
        (lambda running: (running.health().get("in_flight") or 0) > 0, 5.0, signal.SIGTERM),
        (waits_for("policy version 1 from the trainer"), 0.0, signal.SIGINT),
    ],
    ids=["starting", "generating", "waiting"],
)
def test_orchestrator_stops(tmp_path: Path, sign: Sign, latency_s: float, number: int) -> None:
    with toy_orchestrator(toy_config(tmp_path), latency_s) as orchestrator:
        assert_stops(orchestrator, sign, number)


@pytest.mark.parametrize(
    ("sign", "warm"),
    [(imports_torch, False), (waits_for("the orchestrator to answer"), True)],
    ids=["importing", "connecting"],
)
def test_trainer_stops(tmp_path: Path, model: Path, sign: Sign, warm: bool) -> None:
    config = toy_config(tmp_path)
    words = ("trainer", *trainer_flags(config, model, port=1))
    with service("trainer", config.run.path, *words, warm=warm) as trainer:
        assert_stops(trainer, sign)


def test_inference_stops_while_it_loads(tmp_path: Path, model: Path) -> None:
    arguments = ("--model.path", str(model), "--server.port", "0", "--run.dir", str(tmp_path), "--run.name", RUN)
    with service("inference", tmp_path / RUN, "inference", *arguments) as inference:
        assert_stops(inference, imports_torch)


def test_second_signal_ends_a_service_that_cannot_come_to_an_end(tmp_path: Path) -> None:
    """A disk that hangs holds up a cut, which is finished before a clean end: only the second signal frees it."""
    with toy_orchestrator(toy_config(tmp_path), latency_s=1.5) as orchestrator:
        run_dir = orchestrator.run_dir
        orchestrator.until((run_dir.services / "orchestrator.json").exists)
        os.mkfifo(run_dir.outbox / "step-00000001.batch.tmp")  # opening it for writing waits for a reader
        orchestrator.until(lambda: list(run_dir.rollouts.glob("step-*")))
        orchestrator.send(signal.SIGTERM)
        orchestrator.until(lambda: "stopping: rollouts in flight are cancelled" in orchestrator.output)
        orchestrator.send(signal.SIGTERM)
        assert orchestrator.wait(within_s=AT_ONCE_S) == 128 + signal.SIGTERM


TOY = "tests.orchestrator.toy_service"


def command(name: str, folder: Path, model: Path) -> tuple[str, list[str]]:
    """Module and arguments of a service of the run in `folder`, on free ports."""
    config = toy_config(folder)
    if name == "orchestrator":
        return TOY, ["@", str(write_config(config, folder))]
    where = ["--model.path", str(model), "--run.dir", str(folder), "--run.name", RUN]
    return "inference", [*where, "--server.port", "0", "--health.port", "0"]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def assert_refused(second: Service, *said: str) -> None:
    assert second.wait() == ExitCode.USAGE, second.output
    (line,) = second.output.strip().splitlines()
    for words in said:
        assert words in line, line


@pytest.mark.parametrize("name", ["orchestrator", "inference"])
def test_second_service_of_a_run_is_told_pid_and_host_of_the_first(tmp_path: Path, model: Path, name: str) -> None:
    module, arguments = command(name, tmp_path, model)
    run_dir = RunDir(tmp_path / RUN).create()
    before = set(run_dir.path.rglob("*"))
    with run_dir.lock(name), service(name, run_dir.path, module, *arguments) as second:
        assert_refused(second, f"{name} already runs in {run_dir.path} ({me()})")
    changed = set(run_dir.path.rglob("*")) - before - {run_dir.services / f"{name}.lock"}
    assert not changed, "the refused process left files in the run of the first"


@pytest.mark.parametrize(("name", "flag"), [("orchestrator", "--server.endpoint"), ("inference", "--server.port")])
def test_port_that_is_taken_is_named(tmp_path: Path, model: Path, taken: int, name: str, flag: str) -> None:
    module, arguments = command(name, tmp_path, model)
    value = f"tcp://127.0.0.1:{taken}" if flag.endswith("endpoint") else str(taken)
    with service(name, tmp_path / RUN, module, *arguments, flag, value) as second:
        assert_refused(second, f"127.0.0.1:{taken}", "Address already in use", f"set {flag}")


def test_second_trainer_is_refused_by_run_and_by_port(tmp_path: Path, model: Path, taken: int) -> None:
    """In this process: it imports torch before it looks, and once is enough."""
    flags = trainer_flags(toy_config(tmp_path), model, 1)
    with RunDir(tmp_path / RUN).create().lock("trainer"), pytest.raises(UserError) as by_run:
        run_trainer(flags)
    assert f"trainer already runs in {tmp_path / RUN} ({me()})" in str(by_run.value)
    with pytest.raises(UserError, match=f"127.0.0.1:{taken}: Address already in use; set --health.port"):
        run_trainer([*flags, "--health.port", str(taken)])
    assert by_run.value.exit_code == ExitCode.USAGE


def me() -> str:
    return f"pid {os.getpid()} on host {socket.gethostname()}"
