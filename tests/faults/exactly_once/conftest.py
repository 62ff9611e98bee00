from pathlib import Path

import pytest

from tests.faults.exactly_once.fixed_run import FixedRun
from tests.faults.exactly_once.kills import REFERENCE, Campaign, Reference
from tests.support.nursery import Nursery
from tests.support.once import Once


@pytest.fixture(scope="session")
def fixed_run(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> FixedRun:
    """What all runs of this folder have in common."""
    return FixedRun(tmp_path_factory.mktemp("exactly-once") / "runs", "run", random_model)


@pytest.fixture
def campaign(fixed_run: FixedRun, nurseries: dict[str, Nursery], tmp_path: Path) -> Campaign:
    """Runs with kills, in a folder of their own."""
    return Campaign(fixed_run.below(tmp_path), nurseries)


@pytest.fixture(scope="session")
def reference(fixed_run: FixedRun, nurseries: dict[str, Nursery], once: Once) -> Reference:
    """How a run goes that nobody disturbs."""
    folder = once("exactly-once", lambda folder: Campaign(fixed_run.below(folder), nurseries).reference())
    return Reference(folder / REFERENCE)
