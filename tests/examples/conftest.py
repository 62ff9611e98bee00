from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tiny_models.folder import make_folder
from tiny_models.recipe import Recipe
from tiny_models.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights."""
    out = tmp_path_factory.mktemp("models") / "random"
    make_folder(Recipe("copy-text", warm_start=0.0, seed=0), out, lambda progress: None)
    return out
