"""What our code logs while a test runs. `tests/conftest.py` makes the fixtures known to all tests."""

from collections.abc import Iterator

import pytest
from loguru import logger


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """`LEVEL message` of every line."""
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(f"{line.record['level'].name} {line.record['message']}"), level="DEBUG")
    yield lines
    logger.remove(sink)


@pytest.fixture
def warnings_seen() -> Iterator[list[str]]:
    """The messages of warnings and worse."""
    messages: list[str] = []
    sink = logger.add(lambda line: messages.append(line.record["message"]), level="WARNING")
    yield messages
    logger.remove(sink)
