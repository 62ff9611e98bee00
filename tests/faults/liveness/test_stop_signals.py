"""Row 24: SIGTERM or Ctrl-C ends every service with exit code 0 in every phase; a second signal ends it at once."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.liveness.run import RUN, toy_config, toy_orchestrator, trainer_flags
from tests.support.process import Service, service

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
