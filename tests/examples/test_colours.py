"""Images, the tiny vision model, and the environments that show them, as the orchestrator runs them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from chat.tokenizer import Tokenizer
from colour_puzzle import COLOUR, COLOURS
from colour_twice import FAR
from orchestrator.config.envs import EnvConfig
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.loading import load_env
from orchestrator.envs.protocol import EnvAdapter, RolloutRequest
from orchestrator.values.rollout import Rollout
from runtime.errors import UserError
from tests.examples.traces import load_env as load_alone
from tests.examples.traces import scored, tasks_of
from tiny_models.folder import make_folder
from tiny_models.recipe import Recipe
from tiny_models.tokenizer import build_tokenizer
from tiny_models.vision_architecture import build_vision_model
from tiny_models.vision_warm_start import named, prompt, vision_warm_start
from transport.wire.generation import GenerateRequest

IMAGE = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "colour"
    make_folder(Recipe("colour", warm_start=0.0, seed=0), out, lambda progress: None)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def test_number_decides_the_image() -> None:
    assert COLOUR.data_url(7) == COLOUR.data_url(7) != COLOUR.data_url(8)
    assert {COLOUR.answer(number) for number in range(100)} == set(COLOURS)
    assert COLOUR.draw(3).size == (COLOUR.side, COLOUR.side)


def test_image_shows_the_colour_of_its_answer() -> None:
    for number in range(50):
        pixels = np.asarray(COLOUR.draw(number)).reshape(-1, 3).astype(int)
        brightest = pixels[pixels.sum(axis=1).argmax()]
        nearest = min(COLOURS, key=lambda name: np.abs(brightest - COLOURS[name]).sum())
        assert nearest == COLOUR.answer(number)


def test_folder_is_a_whole_vision_model(folder: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.text_config.vocab_size == len(tokenizer)
    assert model.config.text_config.head_dim in (32, 64), "what vLLM serves on a CPU"
    assert tokenizer.convert_ids_to_tokens(model.config.image_token_id) == "<|image_pad|>"
    assert AutoImageProcessor.from_pretrained(folder, backend="pil").patch_size == 4


def test_warm_start_learns(folder: Path) -> None:
    tokenizer = build_tokenizer(vision=True)
    model = build_vision_model(tokenizer, seed=0)
    first, *_, last = islice(vision_warm_start(model, tokenizer, COLOUR, 0.9, seed=0), 12)
    assert last.loss < 0.7 * first.loss
    assert first.exact_match < 0.01


def test_score_of_a_name_does_not_depend_on_longer_names_beside_it() -> None:
    tokenizer = build_tokenizer(vision=True)
    model = build_vision_model(tokenizer, seed=0)
    numbers = list(range(8))
    assert len({len(COLOUR.answer(number)) for number in numbers}) > 1
    with torch.no_grad():
        together = named(model, tokenizer, COLOUR, numbers).logprobs.sum(1)
        alone = torch.cat([named(model, tokenizer, COLOUR, [number]).logprobs.sum(1) for number in numbers])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)


@asynccontextmanager
async def running(
    tokenizer: Tokenizer, replies: list[str], **config: Any
) -> AsyncIterator[tuple[EnvAdapter, list[Any]]]:
    """An environment whose model says `replies`, turn by turn, and what the model was asked."""
    eos_id, asked = min(tokenizer.eos_ids), []

    def script(request: GenerateRequest) -> np.ndarray[Any, np.dtype[np.int32]]:
        asked.append(request)
        return np.append(tokenizer.encode(replies[len(asked) - 1]), np.int32(eos_id))

    env = load_env(EnvConfig(**config), ScriptedEngine(tokenizer.vocab_size, eos_id, script=script), tokenizer)
    await env.start()
    try:
        yield env, asked
    finally:
        await env.close()


async def rollout(env: EnvAdapter) -> Rollout:
    example = env.examples[0]
    request = RolloutRequest(example, f"{env.name}/{example.example_id}/0", 0, 1, 5, 1.0, 16, 60.0)
    (result,) = await env.run(request)
    assert isinstance(result, Rollout), result
    return result


@pytest.mark.parametrize("driver", ["direct", "gateway"])
async def test_name_colour_shows_a_image_and_pays_for_its_name(tokenizer: Tokenizer, driver: str) -> None:
    async with running(tokenizer, [COLOUR.answer(0)], id="name-colour", driver=driver) as (env, (asked)):
        played = await rollout(env)
    assert (played.reward, played.example_id) == (1.0, "0")
    (branch,) = played.branches
    text = tokenizer.decode(branch.token_ids, skip_special_tokens=False)
    expected = f"<|im_start|>user\n{IMAGE}colour?<|im_end|>\n<|im_start|>assistant\n{COLOUR.answer(0)}<|im_end|>"
    assert text == expected
    assert len(asked) == 1
    assert branch.images is not None
    assert branch.images.pixel_values.shape == (16, 48)


async def test_prompt_is_the_one_that_the_warm_start_teaches(tokenizer: Tokenizer, folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    image_id = theirs.convert_tokens_to_ids("<|image_pad|>")
    async with running(tokenizer, ["red"], id="name-colour") as (env, asked):
        await rollout(env)
    assert asked[0].token_ids.numpy().tolist() == prompt(theirs, COLOUR, image_id, [1, 4, 4])


@pytest.mark.parametrize("num_workers", [0, 1])
async def test_colour_twice_keeps_both_images(tokenizer: Tokenizer, num_workers: int) -> None:
    replies = [COLOUR.answer(0), COLOUR.answer(FAR), "wrong"]
    async with running(tokenizer, replies, id="colour-twice", num_workers=num_workers) as (env, asked):
        played = await rollout(env)
    assert played.reward == pytest.approx(2 / 3)
    (branch,) = played.branches
    text = tokenizer.decode(branch.token_ids, skip_special_tokens=False)
    assert text.split("<|im_start|>user\n")[1:] == [
        f"{IMAGE}colour?<|im_end|>\n<|im_start|>assistant\n{replies[0]}<|im_end|>\n",
        f"{IMAGE}colour?<|im_end|>\n<|im_start|>assistant\n{replies[1]}<|im_end|>\n",
        "first?<|im_end|>\n<|im_start|>assistant\nwrong<|im_end|>",
    ]
    assert [request.mm_kwargs["image_grid_thw"].shape[0] for request in asked] == [1, 2, 2]
    assert branch.images is not None
    assert branch.token_types is not None
    assert (branch.images.pixel_values.shape[0], branch.token_types.sum()) == (32, 8)
    last = asked[-1].mm_kwargs["pixel_values"]
    assert bytes(branch.images.pixel_values.data) == bytes(last.data)
    assert played.messages[0]["content"][0]["type"] == "image", "messages hold a digest, no pixels"


async def test_colour_twice_pays_for_each_turn() -> None:
    task = tasks_of(load_alone("colour-twice", num_examples=1))[0]
    first, second = COLOUR.answer(0), COLOUR.answer(FAR)
    assert (await scored(task, first, second, first)).reward == 1.0
    assert (await scored(task, first, second)).reward == pytest.approx(2 / 3)
    assert (await scored(task, "?", "?", "?")).reward == 0.0


def test_images_can_be_others_than_those_of_the_training() -> None:
    tasks = tasks_of(load_alone("name-colour", num_examples=3, first=5000))
    assert [task.data.id for task in tasks] == ["5000", "5001", "5002"]


def test_model_of_text_is_refused_at_start_up(random_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(random_folder)
    engine = ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids))
    with pytest.raises(UserError, match="'name-colour' shows images"):
        load_env(EnvConfig(id="name-colour"), engine, tokenizer)
