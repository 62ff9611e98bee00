"""Real services of one run, as processes that do not outlive the test: start, ask, signal, wait."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from runtime.doctor_evidence import probe_health
from runtime.health import Fact
from runtime.run_dir import RunDir

ROOT = Path(__file__).parents[3]
PATIENCE_S = 90.0
"""For what must happen, but not by a promised time: processes start slowly on a busy machine."""
NOTICE_S = 5.0
"""A dead, frozen or unreachable peer is noticed within this."""


class Service:
    """A process of `run_dir`; its output is in `output`."""

    def __init__(
        self, name: str, run_dir: Path, module: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.run_dir = RunDir(run_dir)
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self._output = run_dir.parent / f"{name}-{time.monotonic_ns()}.output"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env=_environment() | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.process.pid

    @property
    def output(self) -> str:
        """Everything it printed so far."""
        return self._output.read_text(errors="replace")

    def health(self) -> Mapping[str, Fact]:
        """What its announced health endpoint says; empty if it does not answer."""
        info = self.run_dir.read_services().get(self.name)
        return {} if info is None else probe_health(info.health_url, timeout_s=1.0)[0]

    def metrics_text(self) -> str:
        """Its Prometheus page."""
        url = self.run_dir.read_services()[self.name].health_url.replace("/health", "/metrics")
        with urllib.request.urlopen(url, timeout=5) as response:
            return str(response.read().decode())

    def rss_bytes(self) -> int:
        """Resident memory now."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def num_fds(self) -> int:
        """Open descriptors now."""
        return int(psutil.Process(self.pid).num_fds())

    def num_threads(self) -> int:
        """Threads now."""
        return int(psutil.Process(self.pid).num_threads())

    def send(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self, within_s: float = PATIENCE_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {within_s:g} s:\n{self.output[-4000:]}") from None

    def until(self, condition: Callable[[], object], within_s: float = PATIENCE_S) -> float:
        """Seconds until `condition()` is true. Fails at the deadline, or when the process ends before."""
        started = time.monotonic()
        while not condition():
            elapsed = time.monotonic() - started
            assert elapsed < within_s, f"{self.name}: not within {within_s:g} s:\n{self.output[-4000:]}"
            assert self.process.poll() is None or condition(), f"{self.name} ended:\n{self.output[-4000:]}"
            time.sleep(0.02)
        return time.monotonic() - started

    def kill(self) -> None:
        """End it and what it started, whatever state it is in."""
        for child in _family(self.pid):
            child.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=PATIENCE_S)


def _family(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _environment() -> dict[str, str]:
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in os.environ.items() if key not in hidden} | {"OMP_NUM_THREADS": "1"}


@contextmanager
def service(name: str, run_dir: Path, module: str, *arguments: str, **environment: str) -> Iterator[Service]:
    """A running `python -m module`, killed at the end of the block if it still lives."""
    started = Service(name, run_dir, module, arguments, environment)
    try:
        yield started
    finally:
        started.kill()


@contextmanager
def frozen(target: Service) -> Iterator[None]:
    """SIGSTOP while the block lasts."""
    target.send(signal.SIGSTOP)
    try:
        yield
    finally:
        target.send(signal.SIGCONT)
