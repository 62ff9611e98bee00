"""Services that are imported once for all tests of faults, and forked for each start."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.faults.exactly_once.nursery import Nursery


@pytest.fixture(scope="session")
def nurseries() -> Iterator[dict[str, Nursery]]:
    """Orchestrator and trainer."""
    with ExitStack() as stack:
        yield {service: stack.enter_context(Nursery(service)) for service in ("orchestrator", "trainer")}


@pytest.fixture(scope="session")
def inference_nursery() -> Iterator[Nursery]:
    """The embedded engine."""
    with Nursery("inference") as nursery:
        yield nursery
