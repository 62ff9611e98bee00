"""Real orchestrator processes for tests: start, watch, kill."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from orchestrator.config import OrchestratorConfig

DEADLINE_S = 60.0
ROOT = Path(__file__).resolve().parents[3]
"""Where a child finds the package `tests`."""


def write_config(config: OrchestratorConfig, folder: Path) -> Path:
    """The config as a file that `@` reads."""
    path = folder / "orchestrator.toml"
    path.write_bytes(msgspec.toml.encode(_without_none(config.model_dump(mode="json"))))
    return path


def _without_none(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


@contextmanager
def process(arguments: Sequence[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that does not outlive the block; its output goes to `log`."""
    settings = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    with log.open("ab") as output:
        child = subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=output, env=settings, cwd=ROOT)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait(timeout=DEADLINE_S)


def poll_until(predicate: Callable[[], bool], what: str, child: "subprocess.Popen[bytes] | None" = None) -> None:
    """Return once `predicate` holds; fail at the deadline, or when `child` ends before."""
    deadline = time.monotonic() + DEADLINE_S
    while not predicate():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        assert child is None or child.poll() is None or predicate(), (
            f"{what}: the process ended with {child.returncode}"
        )
        time.sleep(0.005)
