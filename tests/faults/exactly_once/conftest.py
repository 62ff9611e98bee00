from pathlib import Path

import pytest

from tests.faults.exactly_once.campaign import Campaign, Reference, make_model
from tests.faults.exactly_once.fixed_run import FixedRun
from tests.faults.exactly_once.nursery import Nursery


@pytest.fixture(scope="session")
def fixed_run(tmp_path_factory: pytest.TempPathFactory) -> FixedRun:
    """What all runs of this folder have in common."""
    folder: Path = tmp_path_factory.mktemp("exactly-once")
    return FixedRun(folder / "runs", "run", make_model(folder / "model"))


@pytest.fixture
def campaign(fixed_run: FixedRun, nurseries: dict[str, Nursery], tmp_path: Path) -> Campaign:
    """Runs with kills, in a folder of their own."""
    return Campaign(fixed_run.below(tmp_path), nurseries)


@pytest.fixture(scope="session")
def reference(fixed_run: FixedRun, nurseries: dict[str, Nursery]) -> Reference:
    """How a run goes that nobody disturbs."""
    return Campaign(fixed_run, nurseries).reference()
