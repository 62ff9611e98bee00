"""Warm services of a run on a disk that fails: at most one orchestrator and one trainer at a time."""

from pathlib import Path

from tests.faults.exactly_once.fixed_run import FixedRun
from tests.support.process import Process
from tests.support.waiting import Condition, until

TIMEOUT_S = 120.0


class Services:
    """What they say is kept below `folder`, over all their lives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, Process] = {}

    def start(self, service: str, arguments: list[str]) -> None:
        """Start `service`; its output goes on from where that of an earlier one ended."""
        self._started[service] = Process(self._folder / f"{service}.out", service, *arguments, warm=True)

    def start_both(self, run: FixedRun) -> None:
        """Orchestrator and trainer of `run`."""
        self.start("orchestrator", run.orchestrator())
        self.start("trainer", run.trainer())

    def exit_code(self, service: str) -> int | None:
        """How it ended; `None` while it lives."""
        return self._started[service].poll()

    def wait(self, service: str) -> int:
        """Its exit code."""
        return self._started[service].wait(TIMEOUT_S)

    def wait_both(self) -> tuple[int, int]:
        """Exit codes of orchestrator and trainer."""
        return self.wait("orchestrator"), self.wait("trainer")

    def output(self, service: str) -> str:
        """All that `service` has printed so far."""
        return self._started[service].output if service in self._started else ""

    def until(self, condition: Condition) -> None:
        """Return once `condition` holds; fail at the deadline, with what the services have said."""
        until(condition, TIMEOUT_S, lambda: "\n".join(self.output(service)[-2000:] for service in self._started))

    def kill(self, service: str) -> None:
        """kill -9, and wait until it is gone."""
        self._started[service].kill()

    def kill_all(self) -> None:
        """Leave none."""
        for service in self._started:
            self.kill(service)
