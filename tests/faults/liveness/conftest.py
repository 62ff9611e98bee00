"""A tiny model that any service can load."""

from pathlib import Path

import pytest

from tests.support.models import make_model, save_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers with a character tokenizer and a chat template."""
    return save_model(tmp_path_factory.mktemp("model"), make_model())
