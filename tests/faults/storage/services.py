"""Real services for tests of the disk: start, watch their output, and see how they end."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.faults.exactly_once.fixed_run import FixedRun
from tests.faults.exactly_once.nursery import Child, Nursery

TIMEOUT_S = 120.0


class Services:
    """One orchestrator and one trainer at a time. What they say is kept below `folder`."""

    def __init__(self, nurseries: Mapping[str, Nursery], folder: Path) -> None:
        self._nurseries = nurseries
        self._folder = folder
        self._children: dict[str, Child] = {}

    def start(self, service: str, arguments: list[str]) -> None:
        """Start `service`; its output goes on from where that of an earlier one ended."""
        self._children[service] = self._nurseries[service].start(arguments, self._folder / f"{service}.out")

    def start_both(self, run: FixedRun) -> None:
        """Orchestrator and trainer of `run`."""
        self.start("orchestrator", run.orchestrator())
        self.start("trainer", run.trainer())

    def exit_code(self, service: str) -> int | None:
        """How it ended; `None` while it lives."""
        return self._children[service].poll()

    def wait(self, service: str) -> int:
        """Its exit code."""
        self.until(lambda: self.exit_code(service) is not None, f"the {service} to end")
        code = self.exit_code(service)
        assert code is not None
        return code

    def wait_both(self) -> tuple[int, int]:
        """Exit codes of orchestrator and trainer."""
        return self.wait("orchestrator"), self.wait("trainer")

    def output(self, service: str) -> str:
        """All that `service` has printed so far, over all its lives."""
        path = self._folder / f"{service}.out"
        return path.read_text() if path.exists() else ""

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Return once `condition` holds; fail at the deadline, with what the services have said."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            said = "\n".join(self.output(service)[-2000:] for service in self._children)
            assert time.monotonic() < deadline, f"waited {TIMEOUT_S:g} s for {what}\n{said}"
            time.sleep(0.01)

    def kill(self, service: str) -> None:
        """kill -9, and wait until it is gone."""
        self._children[service].kill()
        self.wait(service)

    def kill_all(self) -> None:
        """Leave none."""
        for child in self._children.values():
            child.kill()
