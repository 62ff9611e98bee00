"""Shared by all tests: their order, and what is made once for all of them. `tests.support` has the helpers."""

from pathlib import Path

import pytest

from tests.docs.pages import train
from tests.integration.circle import make_copy_model
from tests.support.once import Once

pytest_plugins = ("tests.support.logs", "tests.support.nursery", "tests.support.process")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests that start processes come first: one that began last would run for minutes, with a core idle."""
    long = {item.path for item in items if item.get_closest_marker("integration")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Once:
    """`once(name, make)`: a folder that `make(folder)` filled, the same for all processes of the session."""
    own = tmp_path_factory.getbasetemp()
    return Once((own if worker_id == "master" else own.parent) / "once")


@pytest.fixture(scope="session")
def copy_model(once: Once) -> Path:
    """A model that copies five letters rightly about one time in five."""
    return once("copy-text", make_copy_model)


@pytest.fixture(scope="session")
def first_run(once: Once, copy_model: Path) -> Path:
    """A folder like a checkout in which the first run of the quick start was made."""
    return once("first-run", lambda folder: train(folder, copy_model))
