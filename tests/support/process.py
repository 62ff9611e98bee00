"""Processes of a test: cold (`python -m ...`) or warm (see `nursery.py`). None outlives its block or its test."""

import random
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from runtime.health.health import Fact, ask_health
from runtime.run_dir.run_dir import RunDir
from tests.support.nursery import ROOT, Child, nursery, start_cold
from tests.support.waiting import Condition, until

PATIENCE_S = 90.0
"""For what must happen, but not by a promised time: processes start slowly on a busy machine."""
NOTICE_S = 5.0
"""A dead, frozen or unreachable peer is noticed within this."""


class Process:
    """A running `python -m WORDS`; what it prints is appended to `output_file`.

    `warm` is for services of `nursery.py` only. `netns` is the network namespace that it lives in.
    """

    def __init__(
        self,
        output_file: Path,
        *words: str,
        warm: bool = False,
        cwd: Path = ROOT,
        netns: str | None = None,
        **settings: str,
    ) -> None:
        self.output_file = output_file
        output_file.parent.mkdir(parents=True, exist_ok=True)
        module, *arguments = words
        self._child: Child
        if warm:
            self._child = nursery(module).start_warm(arguments, output_file, cwd=cwd, settings=settings, netns=netns)
        else:
            self._child = start_cold(words, output_file, cwd=cwd, settings=settings, netns=netns)
        self.pid = self._child.pid

    @property
    def output(self) -> str:
        """Everything that was printed so far, by all processes with this file."""
        return self.output_file.read_text(errors="replace")

    def poll(self) -> int | None:
        """Exit code, negative for a signal; `None` while it lives."""
        return self._child.poll()

    def rss_bytes(self) -> int:
        """Resident memory now."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def send(self, number: int) -> None:
        """Send it a signal, if it lives."""
        if self.poll() is None:
            psutil.Process(self.pid).send_signal(number)

    def wait(self, within_s: float = PATIENCE_S) -> int:
        """Its exit code."""
        until(lambda: self.poll() is not None, within_s, self._last_words)
        code = self.poll()
        assert code is not None
        return code

    def finish(self, within_s: float = PATIENCE_S) -> str:
        """Output of a process that must end with exit code 0."""
        assert self.wait(within_s) == 0, self.output
        return self.output

    def until(self, condition: Condition, within_s: float = PATIENCE_S) -> float:
        """Seconds until `condition()` is true. Fails at the deadline, or when the process ends before."""

        def holds() -> bool:
            if condition():
                return True
            assert self.poll() is None or condition(), f"ended with {self.poll()}: {self._last_words()}"
            return False

        return until(holds, within_s, self._last_words)

    def stop(self, number: int = signal.SIGTERM, within_s: float = PATIENCE_S) -> int:
        """Send a signal and wait; its exit code."""
        self.send(number)
        return self.wait(within_s)

    def kill(self) -> None:
        """kill -9 of it and of what it started, whatever state it is in."""
        if self.poll() is None:
            for child in _family(self.pid):
                child.kill()
            self._child.kill()
        self.wait()

    def _last_words(self) -> str:
        return f"{self.output_file.name}:\n{self.output[-4000:]}"


class Service(Process):
    """A service of the run in `run_dir`."""

    def __init__(
        self, name: str, run_dir: Path, *words: str, output_file: Path | None = None, **options: object
    ) -> None:
        self.name = name
        self.run_dir = RunDir(run_dir)
        file = output_file or run_dir.parent / f"{name}-{time.monotonic_ns()}.output"
        super().__init__(file, *words, **options)  # type: ignore[arg-type]

    def health(self) -> Mapping[str, Fact]:
        """What its announced health endpoint says; empty if it does not answer."""
        info = self.run_dir.read_services().get(self.name)
        return {} if info is None else ask_health(info.health_url, timeout_s=1.0)[0]

    def metrics_text(self) -> str:
        """Its Prometheus page."""
        url = self.run_dir.read_services()[self.name].health_url.replace("/health", "/metrics")
        with urllib.request.urlopen(url, timeout=5) as response:
            return str(response.read().decode())


def _family(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


@contextmanager
def process(output_file: Path, *words: str, **options: object) -> Iterator[Process]:
    """A `Process` that is killed at the end of the block if it still lives."""
    started = Process(output_file, *words, **options)  # type: ignore[arg-type]
    try:
        yield started
    finally:
        started.kill()


@contextmanager
def service(name: str, run_dir: Path, *words: str, **options: object) -> Iterator[Service]:
    """A `Service` that is killed at the end of the block if it still lives."""
    started = Service(name, run_dir, *words, **options)  # type: ignore[arg-type]
    try:
        yield started
    finally:
        started.kill()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """`start(*words, warm=False)`: a process with an output file of its own that does not outlive the test."""
    with ExitStack() as stack:

        def begin(*words: str, **options: object) -> Process:
            file = tmp_path / f"{words[0]}-{time.monotonic_ns()}.output"
            return stack.enter_context(process(file, *words, **options))

        yield begin


@pytest.fixture
def start_ranks(start: Callable[..., Process]) -> Callable[..., list[Process]]:
    """`start_ranks(2, *arguments)`: warm trainers with the variables of torchrun, and exit codes of their own."""

    def begin(num_ranks: int, *arguments: str) -> list[Process]:
        group = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
        return [start("trainer", *arguments, warm=True, **group, **rank) for rank in ranks]

    return begin


def free_port() -> int:
    """A port that nobody listens on and that the kernel hands to no client: a restarted server finds it free."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@contextmanager
def frozen(target: Process) -> Iterator[None]:
    """SIGSTOP while the block lasts."""
    target.send(signal.SIGSTOP)
    try:
        yield
    finally:
        target.send(signal.SIGCONT)
