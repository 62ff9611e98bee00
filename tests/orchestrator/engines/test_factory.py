from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from chat.tokenizer import Tokenizer
from orchestrator.engines.factory import make_engine
from orchestrator.engines.http_engine import HttpEngine
from orchestrator.engines.scripted import ScriptedEngine
from tests.orchestrator.toys import make_config


@pytest.mark.parametrize(
    ("engines", "kind"),
    [
        ({}, HttpEngine),
        ({"backend": "http"}, HttpEngine),
        ({"backend": "sglang"}, HttpEngine),
        ({"backend": "scripted"}, ScriptedEngine),
    ],
)
def test_the_backend_decides_the_engine(
    tmp_path: Path, tokenizer: Tokenizer, engines: dict[str, Any], kind: type
) -> None:
    assert type(make_engine(make_config(tmp_path, engines=engines), tokenizer)) is kind


def test_http_engines_get_their_token_and_scripted_ones_need_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    token_file = tmp_path / "admin.token"
    make_engine(make_config(tmp_path, engines={"backend": "scripted"}, admin_token_file=token_file), tokenizer)
    assert not token_file.exists()
    make_engine(make_config(tmp_path, admin_token_file=token_file), tokenizer)
    assert token_file.exists()


def test_an_unknown_backend_is_refused_and_the_known_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="'http', 'openai', 'sglang' or 'scripted'"):
        make_config(tmp_path, engines={"backend": "vllm"})
