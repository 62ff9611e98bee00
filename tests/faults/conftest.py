"""What tests of faults share."""

from pathlib import Path

import pytest

from tests.faults.exactly_once.campaign import make_model
from tests.once import Once
from tests.support.nursery import Nursery, nursery


@pytest.fixture(scope="session")
def nurseries() -> dict[str, Nursery]:
    """Orchestrator and trainer."""
    return {service: nursery(service) for service in ("orchestrator", "trainer")}


@pytest.fixture(scope="session")
def random_model(once: Once) -> Path:
    """A tiny model with random weights."""
    return once("random-model", make_model)
