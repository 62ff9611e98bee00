"""`Nursery`: starts a service again and again without paying for its imports each time.

Importing torch or verifiers takes five seconds: most of the life of a process that is killed every few seconds. So one
process imports the service once and forks; the child runs the service's own entry point from its first line, in its own
process, and dies its own death. A `cold_share` of the starts are a plain `python -m <service>` instead.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import pytest

ROOT = Path(__file__).parents[2]
"""Where a child finds the package `tests`."""
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of torchrun, under which the tests themselves may run."""


class Child(Protocol):
    """A started service (a `subprocess.Popen` is one)."""

    pid: int

    def poll(self) -> int | None:
        """Exit code, negative for a signal; `None` while it lives."""
        ...

    def kill(self) -> None:
        """kill -9, unless it is dead."""
        ...


class WarmChild:
    """A child of the nursery process."""

    def __init__(self, nursery: "Nursery", pid: int) -> None:
        self.pid = pid
        self._nursery = nursery

    def poll(self) -> int | None:
        """As `Child`."""
        return self._nursery.exit_code(self.pid)

    def kill(self) -> None:
        """As `Child`. A dead child is a zombie until the next start, so the pid is nobody else's."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """Starts `service`. All children die with it."""

    def __init__(self, service: str, cold_share: float = 0.0) -> None:
        self.service = service
        self.num_cold = 0
        self._cold_share = cold_share
        self._random = random.Random(service)
        self._codes: dict[int, int] = {}
        self._unread = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.nursery_process", service],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment(),
        )
        self._cold: list[subprocess.Popen[bytes]] = []
        assert "ready" in self._read(wait=True)

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._cold:
            child.kill()
            child.wait(timeout=30)
        self._process.communicate(timeout=30)

    def start(self, argv: Sequence[str], output: Path) -> Child:
        """A running service; its output is appended to `output`."""
        if self._random.random() >= self._cold_share:
            return self.start_warm(argv, output)
        self.num_cold += 1
        self._cold.append(start_cold([self.service, *argv], output))
        return self._cold[-1]

    def start_warm(
        self,
        argv: Sequence[str],
        output: Path,
        *,
        cwd: Path = ROOT,
        settings: Mapping[str, str] | None = None,
        netns: str | None = None,
    ) -> Child:
        """As `start_cold`, and never cold."""
        assert self._process.stdin is not None
        self._drain()
        birth = {"argv": argv, "output": str(output), "cwd": str(cwd), "settings": settings or {}, "netns": netns}
        self._process.stdin.write(json.dumps(birth).encode() + b"\n")
        self._process.stdin.flush()
        while "code" in (message := self._read(wait=True)):
            self._codes[message["pid"]] = message["code"]
        return WarmChild(self, message["pid"])

    def exit_code(self, pid: int) -> int | None:
        """How a child ended."""
        self._drain()
        return self._codes.get(pid)

    def _drain(self) -> None:
        while message := self._read(wait=False):
            self._codes[message["pid"]] = message["code"]

    def _read(self, *, wait: bool) -> dict[str, int]:
        """The next message; without `wait`, an empty one if there is none."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        os.set_blocking(descriptor, wait)
        while b"\n" not in self._unread:
            try:
                data = os.read(descriptor, 65536)
            except BlockingIOError:
                return {}
            assert data, f"the nursery of {self.service} died"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, int] = json.loads(line)
        return message


def start_cold(
    words: Sequence[str],
    output: Path,
    *,
    cwd: Path = ROOT,
    settings: Mapping[str, str] | None = None,
    netns: str | None = None,
) -> "subprocess.Popen[bytes]":
    """A running `python -m WORDS` with a session of its own; its output is appended to `output`."""
    place = [] if netns is None else ["ip", "netns", "exec", netns]
    with output.open("ab") as file:
        return subprocess.Popen(
            [*place, sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=cwd,
            env=environment() | (settings or {}),
            start_new_session=True,
        )


def environment() -> dict[str, str]:
    """One thread per process: the cores are shared by all of them."""
    inherited = {key: value for key, value in os.environ.items() if key not in LAUNCHED}
    return inherited | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


_NURSERIES: dict[str, Nursery] = {}


def nursery(service: str) -> Nursery:
    """The nursery of `service` that all tests of this process share."""
    if service not in _NURSERIES:
        _NURSERIES[service] = Nursery(service)
    return _NURSERIES[service]


@pytest.fixture(scope="session", autouse=True)
def _nurseries_end_with_the_tests() -> Iterator[None]:
    yield
    while _NURSERIES:
        _NURSERIES.popitem()[1].__exit__(None, None, None)
