"""A tiny model, and the machines."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.topology.network import Node, network, why_not
from tests.integration.circle import make_copy_model
from tests.once import Once


@pytest.fixture(scope="session")
def copy_model(once: Once) -> Path:
    return once("copy-text", make_copy_model)


@pytest.fixture
def nodes() -> Iterator[dict[str, Node]]:
    """Four machines on one network."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with network(["inference", "orchestrator", "trainer", "trainer-2"]) as found:
        yield found
