"""A tiny model with a warm start, made once; how `rl` is run with vLLM."""

from pathlib import Path

import pytest

from tests.integration.circle import make_copy_model
from tests.once import Once

FLAGS = ("--inference.engine", "vllm")
"""All that differs from a run with the embedded engine."""


@pytest.fixture(scope="session")
def copy_model(once: Once) -> Path:
    """A model that copies five letters rightly about one time in five."""
    return once("copy-text", make_copy_model)
