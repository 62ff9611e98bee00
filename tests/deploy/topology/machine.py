"""A process on a machine of the test's network, with a disk of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.deploy.topology.network import Node

ROOT = Path(__file__).parents[3]
PATIENCE_S = 150.0
"""Processes start slowly on a busy machine."""


class Machine:
    """Runs one command at a time; `disk` is its own folder."""

    def __init__(self, node: Node, disk: Path) -> None:
        self.node = node
        self.disk = disk
        disk.mkdir(parents=True, exist_ok=True)
        self._log = disk / "output"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *words: str) -> None:
        """Start `python -m WORDS` there."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.node.command([sys.executable, "-m", *words]), cwd=ROOT, env=environment, stdout=log, stderr=log
            )

    @property
    def output(self) -> str:
        """What was printed there, the end of it."""
        return self._log.read_text(errors="replace")[-6000:]

    def kill(self) -> None:
        """kill -9 of everything that runs there."""
        if self._process is not None and self._process.poll() is None:
            children = psutil.Process(self._process.pid).children(recursive=True)
            for process in (*children, psutil.Process(self._process.pid)):
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    continue
            self._process.wait(timeout=30)

    def preempt(self) -> int:
        """SIGTERM, as a spot machine gets it; the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """The exit code of what runs there, once it has ended."""
        assert self._process is not None
        return self._process.wait(timeout=PATIENCE_S)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until it holds; fail at the deadline, or when the process has ended before."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{self.node.name}: no {what} in {PATIENCE_S:g} s\n{self.output}"
            ended = self._process is not None and self._process.poll() is not None
            assert not ended or condition(), f"{self.node.name} ended before {what}\n{self.output}"
            time.sleep(0.1)


def steps(run_dir: Path, service: str) -> list[int]:
    """Steps that the service has reported, in order; repeated ones were trained again after a crash."""
    path = run_dir / "metrics" / f"{service}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def last_step(run_dir: Path, service: str) -> int:
    """The last of them; 0: none."""
    return max(steps(run_dir, service), default=0)


def stop_all(machines: Sequence[Machine]) -> None:
    """Leave nothing behind."""
    for machine in machines:
        machine.kill()
