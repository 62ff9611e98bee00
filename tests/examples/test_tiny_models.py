import hashlib
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from text_puzzle import COPY, REVERSE, TextPuzzle
from tiny_models.architecture import build_model
from tiny_models.errors import FolderTakenError, WarmStartError
from tiny_models.folder import make_folder
from tiny_models.recipe import RECIPE_FILE, Recipe
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
