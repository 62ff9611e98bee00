from pathlib import Path

import pytest

from tests.chat.conftest import tokenizer

__all__ = ["env_modules", "tokenizer"]


@pytest.fixture
def env_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tiny environments of `envs/modules/` importable by id."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "envs" / "modules"))
