"""Machines of a test: network namespaces on one bridge, each with an address of its own. Needs root and iproute2.

A process on a machine of the test's network, with a disk of its own.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.nursery import ROOT
from tests.support.process import Process
from tests.support.waiting import Condition

PREFIX = "10.77.0."


@dataclass(frozen=True)
class Node:
    """One machine."""

    name: str
    number: int
    hub: str
    """Namespace of the bridge."""

    @property
    def namespace(self) -> str:
        return f"{self.hub}-{self.number}"

    @property
    def address(self) -> str:
        return f"{PREFIX}{self.number}"

    def command(self, words: Sequence[str]) -> list[str]:
        """`words`, to be run on this machine."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def cut_off(self) -> None:
        """Packets from and to this machine are lost from now on; no connection is closed."""
        ip("-n", self.hub, "link", "set", f"port{self.number}", "down")

    def heal(self) -> None:
        ip("-n", self.hub, "link", "set", f"port{self.number}", "up")


def why_not() -> str | None:
    """Why this machine cannot have namespaces; `None` if it can."""
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    return None if os.geteuid() == 0 else "network namespaces need root"


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@contextmanager
def network(names: Sequence[str]) -> Iterator[dict[str, Node]]:
    """A machine for each name; all of them, and the bridge, are gone after the block."""
    hub = f"tandem{os.getpid()}"
    nodes = {name: Node(name, number, hub) for number, name in enumerate(names, start=1)}
    made: list[str] = []
    try:
        ip("netns", "add", hub)
        made.append(hub)
        ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge0", "up")
        for node in nodes.values():
            ip("netns", "add", node.namespace)
            made.append(node.namespace)
            _plug_in(node)
        yield nodes
    finally:
        for namespace in reversed(made):
            ip("netns", "del", namespace)


def _plug_in(node: Node) -> None:
    port = f"port{node.number}"
    ip("-n", node.hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", node.namespace)
    ip("-n", node.hub, "link", "set", port, "master", "bridge0", "up")
    ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        ip("-n", node.namespace, "link", "set", device, "up")


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
