import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Core
from transformers import AutoTokenizer

from chat.errors import ChatTemplateError
from chat.tokenizer import Tokenizer
from runtime.errors import UserError
from tests.chat.model_folders import BRACKETS, CHATML, TEMPLATES, bpe_tokenizer, character_tokenizer, write_folder

CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "the cat <b>&amp; Ünïcödé"}],
    "system": [{"role": "system", "content": "be brief "}, {"role": "user", "content": " sat on\nthe mat "}],
    "three turns": [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "<think>hm</think>\n\nsat"},
        {"role": "user", "content": "where?"},
    ],
}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": 'at "<x>"', "parameters": {"b": 1, "a": [None]}},
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("core", [character_tokenizer, bpe_tokenizer])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_equals_transformers(
    tmp_path: Path, template: str, conversation: str, core: type[Core], add_generation_prompt: bool
) -> None:
    folder = write_folder(tmp_path, core(), TEMPLATES[template])
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    messages = CONVERSATIONS[conversation]

    text = ours.render(messages, add_generation_prompt=add_generation_prompt)

    options = {"add_generation_prompt": add_generation_prompt}
    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
    encoded = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    assert ours.encode(text).tolist() == encoded["input_ids"]
    assert ours.decode(ours.encode(text)) == theirs.decode(encoded["input_ids"], skip_special_tokens=True)


def test_tools_are_rendered_like_transformers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, character_tokenizer(), TEMPLATES["qwen-like"])
    messages = CONVERSATIONS["system"]
    text = Tokenizer.from_folder(folder).render(messages, tools=[TOOL])
    theirs = AutoTokenizer.from_pretrained(folder)
    assert text == theirs.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert '"a": [null]' in text


def test_template_of_tokenizer_config_is_used_without_a_jinja_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, character_tokenizer(), CHATML)
    expected = Tokenizer.from_folder(folder).render(CONVERSATIONS["system"])
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for chat_template in (CHATML, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": chat_template}))
        assert Tokenizer.from_folder(folder).render(CONVERSATIONS["system"]) == expected


def test_template_that_refuses_is_a_typed_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, character_tokenizer(), BRACKETS))
    with pytest.raises(ChatTemplateError, match="unknown role pirate"):
        tokenizer.render([{"role": "pirate", "content": "arr"}])


def test_template_cannot_reach_into_python(tmp_path: Path) -> None:
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, character_tokenizer(), source))
    with pytest.raises(ChatTemplateError, match="unsafe"):
        tokenizer.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(("eos", "expected"), [(2, {2}), ([2, 0], {0, 2})], ids=["one id", "several ids"])
def test_eos_ids_come_from_the_generation_config(tmp_path: Path, eos: object, expected: set[int]) -> None:
    folder = write_folder(tmp_path, character_tokenizer(), CHATML)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert Tokenizer.from_folder(folder).eos_ids == expected


def test_eos_ids_fall_back_to_config_and_then_to_the_eos_token(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, character_tokenizer(), CHATML)
    (folder / "generation_config.json").unlink()
    assert Tokenizer.from_folder(folder).eos_ids == {character_tokenizer().token_to_id("<|im_end|>")}
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert Tokenizer.from_folder(folder).eos_ids == {1}


def test_ids_are_int32_and_round_trip(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abc<|im_end|>")
    assert ids.dtype == np.int32
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "abc"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "abc<|im_end|>"
    assert tokenizer.vocab_size == character_tokenizer().get_vocab_size()


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path, character_tokenizer(), CHATML)
    (folder / name).unlink()
    with pytest.raises(UserError, match=name):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_broken_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path, character_tokenizer(), CHATML)
    (folder / name).write_text("{")
    with pytest.raises(UserError, match=name):
        Tokenizer.from_folder(folder)


def test_template_that_does_not_compile_is_the_users_mistake(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, character_tokenizer(), "{% for %}")
    with pytest.raises(UserError, match="does not compile"):
        Tokenizer.from_folder(folder)
