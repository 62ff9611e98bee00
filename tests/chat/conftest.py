import pytest

from chat.tokenizer import Tokenizer
from tests.chat.model_folders import CHATML, bpe_tokenizer, character_tokenizer, write_folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_folder(tmp_path_factory.mktemp("character"), character_tokenizer(), CHATML)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("bpe"), bpe_tokenizer(), CHATML))
