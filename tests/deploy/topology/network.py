"""Machines of a test: network namespaces on one bridge, each with an address of its own. Needs root and iproute2."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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
