"""The machines of a test."""

from collections.abc import Iterator

import pytest

from tests.deploy.topology.machines import Node, network, why_not


@pytest.fixture
def nodes() -> Iterator[dict[str, Node]]:
    """Four machines on one network."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with network(["inference", "orchestrator", "trainer", "trainer-2"]) as found:
        yield found
