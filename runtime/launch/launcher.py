"""Starts the services of one run, watches them, and stops them together.

    start ──all healthy──▶ run ──those that end by themselves ended with 0──▶ finished
      │                     │
      └──a service died, a deadline passed, a stop was asked for──▶ stop all, in the reverse order of their start

However it ends, `rl` being killed included, no process of the run stays (`runtime/process/guardian.py`).
"""

import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from runtime.errors import ChildDiedError, ExitCode, StallError
from runtime.launch.progress_view import ProgressView
from runtime.launch.run_monitor import RunMonitor
from runtime.process.child import Child
from runtime.process.guardian import COOKIE_VARIABLE, Guardian
from runtime.process.shutdown import Shutdown
from runtime.run_dir.run_dir import RunDir

END_TIMEOUT_S = 300.0
"""Seconds in which all services that end by themselves must end once the first has: the orchestrator waits for the last
commit, and the trainer writes its last checkpoint."""
TICK_S = 0.2
SETTLE_S = 1.0
"""Seconds to wait after a death for others that follow: the first to be noticed need not be the culprit."""


class LaunchOutcome(StrEnum):
    """How a launch ended, if it did not fail."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """A signal or the user asked for the end."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One service: the process to start."""

    name: str
    command: tuple[str, ...]
    ends_by_itself: bool


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a launch waits for what, in seconds (`RlConfig` explains the first two)."""

    start_timeout_s: float
    grace_s: float
    end_timeout_s: float = END_TIMEOUT_S
    """Between the end of the first service and that of the last one that ends by itself."""


class _StopRequestedError(Exception):
    """Control flow inside this module: the user wants the run to end."""


class Launcher:
    """Runs `launches`, in this order, in `run_dir`. One launcher is for one `run`."""

    def __init__(
        self,
        launches: Sequence[Launch],
        deadlines: Deadlines,
        *,
        run_dir: RunDir,
        monitor: RunMonitor,
        view: ProgressView,
        shutdown: Shutdown,
    ) -> None:
        self._launches = {launch.name: launch for launch in launches}
        self._deadlines = deadlines
        self._run_dir = run_dir
        self._monitor = monitor
        self._view = view
        self._shutdown = shutdown
        self._children: dict[str, Child] = {}
        self._environment = os.environ | {COOKIE_VARIABLE: secrets.token_hex(16), "PYTHONUNBUFFERED": "1"}
        self._environment.setdefault("OMP_NUM_THREADS", "1")  # more slow each other down on a CPU that services share

    def run(self, prepare: Sequence[str] = ()) -> LaunchOutcome:
        """Run to the end. Raises `ChildDiedError` when a service dies, `StallError` when a deadline passes."""
        with Guardian(self._environment[COOKIE_VARIABLE], self._deadlines.grace_s):
            try:
                if prepare:
                    self._prepare(prepare)
                self._start()
                self._until(self._all_ready, self._deadlines.start_timeout_s, "did not become healthy")
                self._until(self._first_ended, None, "")
                self._until(self._all_ended, self._deadlines.end_timeout_s, "did not end after the others had")
                return LaunchOutcome.FINISHED
            except _StopRequestedError:
                return LaunchOutcome.STOPPED
            finally:
                self._stop()

    def _prepare(self, command: Sequence[str]) -> None:
        child = self._spawn(Launch("prepare", tuple(command), ends_by_itself=True))
        self._until(lambda: [] if child.exit_code == 0 else ["prepare"], self._deadlines.start_timeout_s, "did not end")
        del self._children[child.name]

    def _start(self) -> None:
        for name in self._launches:
            self._run_dir.withdraw_leftover(name)
        others = self._run_dir.read_services()  # of a run before, whose services are about to end
        for launch in self._launches.values():
            self._spawn(launch)
        self._monitor.health.start(others)

    def _spawn(self, launch: Launch) -> Child:
        log = self._run_dir.logs / f"{launch.name}.out"
        child = Child(launch.name, launch.command, environment=self._environment, log=log, forward=self._view.forward)
        self._children[launch.name] = child
        return child

    def _until(self, condition: Callable[[], list[str]], timeout_s: float | None, complaint: str) -> None:
        """Watch until `condition` names no service any more."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while missing := condition():
            self._show()
            self._raise_if_failed()
            if deadline is not None and time.monotonic() > deadline:
                raise StallError(f"{', '.join(missing)} {complaint} within {timeout_s:g} s")
            if self._shutdown.wait(TICK_S):
                raise _StopRequestedError
        self._raise_if_failed()
        self._show()

    def _show(self) -> None:
        for progress in self._monitor.poll():
            self._view.update(progress)

    def _all_ready(self) -> list[str]:
        health = self._monitor.health
        return [name for name, child in self._children.items() if child.exit_code is None and not health.is_ready(name)]

    def _first_ended(self) -> list[str]:
        alive = self._all_ended()
        return alive if len(alive) == sum(launch.ends_by_itself for launch in self._launches.values()) else []

    def _all_ended(self) -> list[str]:
        return [
            name
            for name, child in self._children.items()
            if self._launches[name].ends_by_itself and child.exit_code is None
        ]

    def _failed(self) -> list[Child]:
        return [
            child
            for name, child in self._children.items()
            if child.exit_code
            or (child.exit_code == 0 and name in self._launches and not self._launches[name].ends_by_itself)
        ]

    def _raise_if_failed(self) -> None:
        if not self._failed():
            return
        self._shutdown.wait(SETTLE_S)
        culprit = min(self._failed(), key=lambda child: child.exit_code == ExitCode.PEER_LOST)
        code = culprit.exit_code or 0
        if code == ExitCode.USAGE and (lines := culprit.last_lines()):
            raise ChildDiedError(lines[-1], code)  # one line for the user's mistake: the service has said it
        what = f"{culprit.name} {describe_exit(code)}"
        self._view.forward("rl", f"{what}; its last lines:")
        for line in culprit.last_lines():
            self._view.forward("rl", f"  {line}")
        name = signal_name(code)
        raise ChildDiedError(
            f"{what}; its output is in {self._run_dir.logs / culprit.name}.out",
            code or ExitCode.FAILED,
            killed={culprit.name: name} if name else {},
        )

    def _stop(self) -> None:
        """End what lives, newest first: a consumer can still say goodbye to its producer."""
        for child in reversed(self._children.values()):
            child.terminate()
            deadline = time.monotonic() + self._deadlines.grace_s
            while not child.wait(TICK_S) and time.monotonic() < deadline:
                self._show()
            if child.exit_code is None:
                self._view.forward("rl", f"{child.name} did not end within {self._deadlines.grace_s:g} s: killed")
                child.kill()
        self._monitor.health.stop()


def signal_name(code: int) -> str:
    """The signal that ended a process of this exit code; empty if none did."""
    try:
        return signal.Signals(code - 128).name if code > 128 else ""
    except ValueError:  # an exit code above 128 that does not stand for a signal
        return ""


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if killer := signal_name(code):
        return f"was killed by {killer}"
    try:
        name = ExitCode(code).name.lower().replace("_", " ")
    except ValueError:
        return f"died with exit code {code}"
    return "ended too early" if code == 0 else f"died with exit code {code} ({name})"
