"""Shared by all tests: polling with a deadline, free ports, and a check that no test leaves processes behind."""

import time
from collections.abc import Callable

import pytest

Poll = Callable[..., None]


@pytest.fixture
def eventually() -> Poll:
    """`eventually(condition, within_s=10)`: wait until `condition()` is true, fail at the deadline."""

    def wait(condition: Callable[[], object], within_s: float = 10.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {within_s} s: {condition}"
            time.sleep(0.02)

    return wait
