"""Services that are imported once for all tests of faults, and forked for each start; a model for them."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.exactly_once.campaign import make_model
from tests.faults.exactly_once.nursery import Nursery
from tests.once import Once


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


@pytest.fixture(scope="session")
def random_model(once: Once) -> Path:
    """A tiny model with random weights."""
    return once("random-model", make_model)
