"""A process on a machine of the test's network, with a disk of its own."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.deploy.topology.network import Node
from tests.support.nursery import ROOT
from tests.support.process import Process
from tests.support.waiting import Condition

PATIENCE_S = 150.0
"""Processes start slowly on a busy machine."""
SETTINGS = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
}


class Machine:
    """Runs one command at a time; `disk` is its own folder."""

    def __init__(self, node: Node, disk: Path) -> None:
        self.node = node
        self.disk = disk
        self._process: Process | None = None

    def start(self, *words: str, warm: bool = False) -> None:
        """Start `python -m WORDS` there."""
        self._process = Process(self.disk / "output", *words, warm=warm, netns=self.node.namespace, **SETTINGS)

    @property
    def process(self) -> Process:
        """What was started last."""
        assert self._process is not None
        return self._process

    @property
    def output(self) -> str:
        """What was printed there, the end of it."""
        return self.process.output[-6000:]

    def kill(self) -> None:
        """kill -9 of everything that runs there."""
        if self._process is not None:
            self._process.kill()

    def preempt(self) -> int:
        """SIGTERM, as a spot machine gets it; the exit code."""
        return self.process.stop(signal.SIGTERM, PATIENCE_S)

    def wait(self) -> int:
        """The exit code of what runs there, once it has ended."""
        return self.process.wait(PATIENCE_S)

    def until(self, condition: Condition) -> None:
        """Poll until it holds; fail at the deadline, or when the process has ended before."""
        self.process.until(condition, PATIENCE_S)


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
