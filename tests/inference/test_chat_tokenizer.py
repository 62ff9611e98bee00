"""Messages to tokens with the model's own template, or a reason why not."""

import threading
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from inference.api.chat_request import ChatTokenizer
from inference.config import InferenceConfig, ServedModelConfig
from inference.errors import BadRequest
from inference.torch_engine.loading import load_tokenizer
from tests.support.models import make_tokenizer

MESSAGES = [{"role": "user", "content": "hello"}]


def loaded(path: Path) -> ChatTokenizer:
    return load_tokenizer(InferenceConfig(model=ServedModelConfig(path=path)))


def test_chat_is_encoded_up_to_where_the_assistant_speaks(model_dir: Path) -> None:
    ids = loaded(model_dir).encode_chat(MESSAGES, {})
    assert ids.dtype == np.int32
    assert make_tokenizer().decode(ids) == "<bos><user>hello<assistant>"


def test_text_has_no_special_tokens_but_single_tokens_do(model_dir: Path) -> None:
    tokenizer = loaded(model_dir)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES, {})) == "hello"
    assert tokenizer.token_text(2) == "<eos>"


def test_token_beyond_the_tokenizer_has_no_text(model_dir: Path) -> None:
    assert loaded(model_dir).decode(np.array([5, 4000, 6], dtype=np.int32)) == "ab"


def test_folder_without_tokenizer_serves_all_but_chat(tmp_path: Path, model: PreTrainedModel) -> None:
    model.config.save_pretrained(tmp_path)
    with pytest.raises(BadRequest, match="chat is not possible"):
        loaded(tmp_path).encode_chat(MESSAGES, {})


def test_tokenizer_without_template_is_told_apart(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(BadRequest, match="no chat template"):
        loaded(tmp_path).encode_chat(MESSAGES, {})


def test_messages_that_the_template_refuses_are_the_callers_mistake() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadRequest, match="roles must alternate"):
        ChatTokenizer(tokenizer).encode_chat(MESSAGES, {})


def test_template_arguments_reach_the_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ 'on' if thinking else 'off' }}"
    chat = ChatTokenizer(tokenizer)
    assert chat.decode(chat.encode_chat(MESSAGES, {"thinking": True})) == "on"
    assert chat.decode(chat.encode_chat(MESSAGES, {})) == "off"


def test_two_threads_may_use_it_at_once(model_dir: Path) -> None:
    tokenizer, failures = loaded(model_dir), []

    def work(encode: bool) -> None:
        try:
            for _ in range(200):
                if encode:
                    tokenizer.encode_chat(MESSAGES, {})
                else:
                    tokenizer.decode(np.arange(5, 30, dtype=np.int32))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(encode,)) for encode in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
