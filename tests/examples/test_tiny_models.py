import hashlib
import string
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from chat.tokenizer import Tokenizer
from text_puzzle import COPY, PUZZLES, REVERSE, TextPuzzle
from tiny_models.architecture import build_model
from tiny_models.cli import main
from tiny_models.errors import FolderTakenError, WarmStartError
from tiny_models.folder import make_folder
from tiny_models.recipe import RECIPE_FILE, Recipe
from tiny_models.tokenizer import CHARACTERS, END, PAD, START, UNKNOWN, build_tokenizer
from tiny_models.warm_start import MAX_STEPS, Progress, answer_logprobs, expected_exact_match, tokenize, warm_start

RANDOM = Recipe("copy-text", warm_start=0.0, seed=0)


def ignore(progress: Progress) -> None:
    """For makers whose progress is of no interest."""


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def trained(
    puzzle: TextPuzzle, target: float, seed: int, tokenizer: PreTrainedTokenizerFast, max_steps: int | None = None
) -> list[Progress]:
    return list(islice(warm_start(build_model(tokenizer, seed), tokenizer, puzzle, target, seed), max_steps))


def test_folder_loads_with_the_vocabulary_of_its_tokenizer(
    random_folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_folder)
    assert model.config.vocab_size == len(tokenizer) == model.get_input_embeddings().weight.shape[0]
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_heads_are_of_a_size_that_vllm_serves_on_a_cpu(random_folder: Path) -> None:
    assert AutoModelForCausalLM.from_pretrained(random_folder).config.head_dim in (32, 64)


def test_generation_defaults_do_not_truncate_the_distribution(random_folder: Path) -> None:
    defaults = AutoModelForCausalLM.from_pretrained(random_folder).generation_config
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (1.0, 1.0, 0)


def test_seed_decides_the_weights(random_folder: Path, tmp_path: Path) -> None:
    make_folder(RANDOM, tmp_path / "same", ignore)
    make_folder(Recipe("copy-text", warm_start=0.0, seed=1), tmp_path / "other", ignore)
    assert digest(tmp_path / "same") == digest(random_folder) != digest(tmp_path / "other")


def test_making_a_model_leaves_the_callers_random_numbers_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    build_model(tokenizer, seed=0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("puzzle", "seed"), [(COPY, 0), (REVERSE, 1)])
def test_warm_start_reaches_its_target_within_a_hundred_steps(
    puzzle: TextPuzzle, seed: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    history = trained(puzzle, 0.2, seed, tokenizer)
    assert history[0].exact_match < 0.01
    assert 0.2 <= history[-1].exact_match < 0.45
    assert all(progress.exact_match < 0.2 for progress in history[:-1])
    assert history[-1].step == len(history) - 1 <= 100
    assert history[-1].loss < history[0].loss / 4


def test_warm_start_is_decided_by_its_seed(tokenizer: PreTrainedTokenizerFast) -> None:
    first, same, other = (trained(COPY, 0.9, seed, tokenizer, max_steps=4) for seed in (3, 3, 4))
    assert first == same != other


def test_expected_match_is_the_rate_at_which_samples_are_right(tokenizer: PreTrainedTokenizerFast) -> None:
    puzzle = COPY.resized("ab", 1)
    model = build_model(tokenizer, seed=0)
    list(warm_start(model, tokenizer, puzzle, 0.3, seed=0))
    prompts, answers = tokenize(tokenizer, puzzle, ["a", "b"])
    expected = expected_exact_match(answer_logprobs(model, prompts, answers))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sampled = model.generate(
            prompts.repeat(1000, 1), attention_mask=torch.ones(2000, prompts.shape[1]), max_new_tokens=answers.shape[1]
        )
    right = (sampled[:, prompts.shape[1] :] == answers.repeat(1000, 1)).all(1).float().mean().item()
    assert right == pytest.approx(expected, abs=0.04)


def test_unreachable_target_is_an_error(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_STEPS >= 200
    monkeypatch.setattr("tiny_models.warm_start.MAX_STEPS", 3)
    with pytest.raises(WarmStartError, match=r"copy-text: exact match did not reach 0.99 in 3 supervised steps"):
        trained(COPY, 0.99, 0, tokenizer)


def test_complete_folder_is_left_alone(random_folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in random_folder.iterdir()}
    make_folder(RANDOM, random_folder, ignore)
    assert {path: path.stat().st_mtime_ns for path in random_folder.iterdir()} == before


def test_folder_of_another_recipe_is_not_overwritten(random_folder: Path) -> None:
    before = digest(random_folder)
    with pytest.raises(FolderTakenError, match="made in another way"):
        make_folder(Recipe("copy-text", warm_start=0.0, seed=9), random_folder, ignore)
    assert digest(random_folder) == before


def test_folder_of_unknown_origin_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FolderTakenError, match="remove it or choose another"):
        make_folder(RANDOM, tmp_path, ignore)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_empty_folder_is_filled(tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    make_folder(RANDOM, out, ignore)
    assert RANDOM.made(out)


def test_interrupted_making_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_folder(Recipe("copy-text", warm_start=0.5, seed=0), tmp_path / "model", interrupt)
    assert list(tmp_path.iterdir()) == []


def test_broken_recipe_file_does_not_count_as_complete(tmp_path: Path) -> None:
    (tmp_path / RECIPE_FILE).write_text('{"task": "copy')
    assert not RANDOM.made(tmp_path)
    assert not RANDOM.made(tmp_path / RECIPE_FILE)
    assert not RANDOM.made(tmp_path / "absent")


def test_makes_a_warm_started_folder_and_says_how_it_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "nested" / "model"
    assert main(["--task", "copy-text", "--warm-start", "1e-8", "--seed", "2", "--out", str(out)]) == 0
    assert Recipe("copy-text", 1e-8, 2).made(out)
    printed = capsys.readouterr().out
    assert "warm start: step    0" in printed
    assert f"{out}: made in" in printed


def test_second_call_does_nothing_and_needs_no_torch(random_folder: Path) -> None:
    code = (
        "import sys; from tiny_models.cli import main; "
        f"code = main(['--task', 'copy-text', '--out', {str(random_folder)!r}]); "
        "sys.exit(code or 3 * ('torch' in sys.modules))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (finished.returncode, finished.stdout) == (0, f"{random_folder}: already made\n")


def test_taken_folder_is_one_line_and_a_failure(random_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--task", "reverse-text", "--out", str(random_folder)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--task", "sort-text", "--out", "x"], "invalid choice: 'sort-text'"),
        (["--task", "copy-text", "--out", "x", "--warm-start", "1.5"], "1.5 is not in [0, 1)"),
        (["--task", "copy-text"], "--out"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert complaint in capsys.readouterr().err


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
