"""Shared by all tests: polling with a deadline, and what is made once for all of them."""

import time
from collections.abc import Callable

import pytest

from tests.once import Once

Poll = Callable[..., None]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests that start processes come first: one that began last would run for minutes, with a core idle."""
    long = {item.path for item in items if item.get_closest_marker("integration")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture
def eventually() -> Poll:
    """`eventually(condition, within_s=10)`: wait until `condition()` is true, fail at the deadline."""

    def wait(condition: Callable[[], object], within_s: float = 10.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {within_s} s: {condition}"
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Once:
    """`once(name, make)`: a folder that `make(folder)` filled, the same for all processes of the session."""
    own = tmp_path_factory.getbasetemp()
    return Once((own if worker_id == "master" else own.parent) / "once")
