"""A generated run, opened once for all tests that only read."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.viewer.generated_run import make_run
from viewer.index.run import Run


@pytest.fixture(scope="session")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with two environments."""
    return make_run(tmp_path_factory.mktemp("runs") / "generated")


@pytest.fixture(scope="session")
def generated(run_path: Path) -> Iterator[Run]:
    """The same, opened."""
    run = Run(run_path, None)
    run.refresh()
    yield run
    run.close()
