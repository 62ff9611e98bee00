"""`VllmServer`: one life of vLLM's server, a child process with children of its own."""

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import TracebackType

import msgspec

from runtime.health.health import http_answer
from runtime.process.child import Child

HEALTH_TIMEOUT_S = 5.0


class Condition(StrEnum):
    """What the server is found to be."""

    ABSENT = "absent"
    """It does not answer: still loading, or too busy, or hanging."""
    OK = "ok"
    FOREIGN = "foreign"
    """Somebody answers who is not our plugin."""
    DEAD = "dead"
    """It answers that its engine has died, or that it holds weights it cannot vouch for."""
    ENDED = "ended"
    """The process is gone."""


class Report(msgspec.Struct, frozen=True):
    """The part of `/health` that the supervisor reads."""

    status: str
    version: int = -1
    running: int = 0
    waiting: int = 0


class VllmServer:
    """Context manager; leaving it ends the process and whatever it started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, url: str) -> None:
        self._child = Child("vllm", command, environment=environment, log=log, forward=lambda name, line: None)
        self._url = url
        self.report: Report | None = None
        """What it said last."""

    @property
    def pid(self) -> int:
        """Of the API server."""
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it lives."""
        return self._child.exit_code

    def last_lines(self) -> list[str]:
        """The end of its output."""
        return self._child.last_lines()

    def look(self) -> Condition:
        """Ask it how it is. Takes at most `HEALTH_TIMEOUT_S`."""
        if self._child.exit_code is not None:
            return Condition.ENDED
        try:
            self.report = msgspec.json.decode(http_answer(f"{self._url}/health", HEALTH_TIMEOUT_S), type=Report)
        except OSError:  # no connection, no answer in time, or one that broke off
            return Condition.ABSENT
        except (msgspec.MsgspecError, RecursionError):
            return Condition.FOREIGN
        return Condition.OK if self.report.status == "ok" else Condition.DEAD

    def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`."""
        self._child.terminate()
        self._child.wait(grace_s)

    def __enter__(self) -> "VllmServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Its engine processes are in its group; when the API server was killed, they may not have noticed yet.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(HEALTH_TIMEOUT_S)
