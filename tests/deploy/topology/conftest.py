"""A tiny model, and the machines."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.topology.network import Node, network, why_not
from tests.integration.circle import ROOT, environment


@pytest.fixture(scope="session")
def copy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "copy-text"
    command = [sys.executable, "-m", "tiny_models", "--task", "copy-text", "--warm-start", "0.2", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=280)
    return folder


@pytest.fixture
def nodes() -> Iterator[dict[str, Node]]:
    """Four machines on one network."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with network(["inference", "orchestrator", "trainer", "trainer-2"]) as found:
        yield found
