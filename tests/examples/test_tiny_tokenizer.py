import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chat.tokenizer import Tokenizer
from text_puzzle import COPY, PUZZLES, TextPuzzle
from tiny_models.tokenizer import CHARACTERS, END, PAD, START, UNKNOWN, build_tokenizer

TOKENIZER = build_tokenizer()


@given(st.text(alphabet=CHARACTERS))
def test_any_known_text_survives_a_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


@given(st.lists(st.sampled_from([i for i in range(len(TOKENIZER)) if TOKENIZER.convert_ids_to_tokens(i) != UNKNOWN])))
def test_any_sampled_ids_survive_a_round_trip(ids: list[int]) -> None:
    assert TOKENIZER.encode(TOKENIZER.decode(ids)) == ids


def test_all_printable_characters_are_known(tokenizer: PreTrainedTokenizerFast) -> None:
    printable = string.ascii_letters + string.digits + string.punctuation + " \n"
    assert tokenizer.unk_token_id not in tokenizer.encode(printable)
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_markers_are_single_tokens_and_vanish_from_plain_text(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode(f"{START}a{END}{PAD}")
    assert len(ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


def test_conversation_ends_at_the_end_marker(tokenizer: PreTrainedTokenizerFast) -> None:
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_chat_template_is_qwens(tokenizer: PreTrainedTokenizerFast) -> None:
    conversation = [
        {"role": "system", "content": "be exact"},
        {"role": "user", "content": "copy: ab"},
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "again"},
    ]
    expected = (
        "<|im_start|>system\nbe exact<|im_end|>\n<|im_start|>user\ncopy: ab<|im_end|>\n"
        "<|im_start|>assistant\nab<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(conversation, tokenize=False) == expected
    prompt = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert prompt == expected + "<|im_start|>assistant\n"


@pytest.mark.parametrize("puzzle", PUZZLES.values(), ids=PUZZLES.keys())
def test_orchestrator_renders_the_prompts_of_the_warm_start(
    puzzle: TextPuzzle, tokenizer: PreTrainedTokenizerFast, random_folder: Path
) -> None:
    messages = [{"role": "user", "content": puzzle.prompt(puzzle.text(1))}]
    trained_on = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Tokenizer.from_folder(random_folder).encode_chat(messages).tolist() == trained_on


def test_prompts_and_answers_fit_the_engines_of_the_configs(tokenizer: PreTrainedTokenizerFast) -> None:
    for puzzle in PUZZLES.values():
        messages = [{"role": "user", "content": puzzle.prompt(puzzle.text(0))}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert len(prompt) + 8 <= 64


def test_saved_tokenizer_loads_as_it_was(tokenizer: PreTrainedTokenizerFast, random_folder: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(random_folder)
    text = f"{START}user\n{COPY.prompt('abc')}{END}\n"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
