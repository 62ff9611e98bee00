"""A tiny model with a warm start, made once."""

from pathlib import Path

import pytest

from tests.integration.circle import make_copy_model


@pytest.fixture(scope="session")
def copy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that copies five letters rightly about one time in five."""
    return make_copy_model(tmp_path_factory.mktemp("models") / "copy-text")
