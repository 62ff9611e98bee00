"""A tiny model, warm services, a small disk, and the result of a run that nothing happened to."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.exactly_once.fixed_run import FixedRun
from tests.faults.exactly_once.signs import Result, result_of
from tests.faults.storage.services import Services
from tests.faults.storage.small_disk import SmallDisk, small_disk

MAX_STEPS = 8


@pytest.fixture(scope="session")
def model_path(random_model: Path) -> Path:
    """A tiny model with random weights."""
    return random_model


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    """Starts services, and ends those that still live."""
    started = Services(tmp_path)
    yield started
    started.kill_all()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """24 MB."""
    with small_disk(tmp_path / "disk", 24) as mounted:
        yield mounted


@pytest.fixture(scope="session")
def fixed_run(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> FixedRun:
    """What all runs of this folder have in common."""
    folder = tmp_path_factory.mktemp("storage")
    return FixedRun(folder, "run", model_path, max_steps=MAX_STEPS, checkpoint_steps=2)


@pytest.fixture(scope="session")
def reference(fixed_run: FixedRun, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """How a run ends that nobody disturbs."""
    started = Services(tmp_path_factory.mktemp("reference"))
    try:
        started.start_both(fixed_run)
        assert started.wait_both() == (0, 0), started.output("trainer") + started.output("orchestrator")
    finally:
        started.kill_all()
    return result_of(fixed_run.path, MAX_STEPS)
