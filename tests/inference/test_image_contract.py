"""Images over the HTTP contract, for every engine: log probabilities are those of the model's own forward.

`make test` runs it against the embedded engine, `make test-vllm` against vLLM, as `test_engine_contract.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from inference.api.images import Images
from inference.weights.publish import model_digest
from tests.inference.contract_server import (
    TOLERANCE,
    Server,
    apply,
    error_of,
    generate,
    running_server,
    served,
    until_health,
)
from tests.inference.tiny_vision import (
    FAMILIES,
    make_vision_model,
    own_logprobs,
    prompt_with,
    request_with,
    save_vision_model,
)
from tests.support.models import publish
from transport.wire.codec import encode
from transport.wire.generation import GENERATE_PATH, GenerateReply
from transport.wire.sample import EncodedTensor

pytestmark = pytest.mark.integration
Prompt = tuple[list[int], Images | None]


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest) -> dict[int, PreTrainedModel]:
    """Policy versions of one family; 0 is what the server starts with."""
    return {version: make_vision_model(request.param, version) for version in range(2)}


@pytest.fixture(scope="module")
def server(models: dict[int, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("images")
    with running_server(folder, save_vision_model(folder / "model", models[0])) as server:
        yield server


@pytest.fixture
async def http(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    url = await asyncio.to_thread(lambda: server.url)
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


def many_prompts(rng: np.random.Generator) -> list[Prompt]:
    """Text, one image, several, the same prompt twice, and with another image in the same place."""
    first = prompt_with(rng, (2, 2))
    tokens, images = first
    other = Images(-images.pixel_values, images.grids, images.token_types, 2, b"")
    several = [prompt_with(rng, (1, 3), (2, 1)), prompt_with(rng, (3, 2), (1, 1), (2, 2))]
    return [([5, 6, 7], None), first, first, (tokens, other), *several, ([9] * 30, None)]


def assert_exact(models: dict[int, PreTrainedModel], prompt: Prompt, reply: GenerateReply) -> None:
    """Every token has the log probability that the version of its span gives it."""
    tokens, logprobs = reply.token_ids.numpy().tolist(), torch.tensor(reply.logprobs.numpy())
    assert reply.versions[-1].end == len(tokens) == len(logprobs)
    for span in reply.versions:
        expected = own_logprobs(models[span.version], *prompt, tokens)[span.start : span.end]
        torch.testing.assert_close(logprobs[span.start : span.end], expected, atol=TOLERANCE, rtol=0)


async def test_prompts_with_and_without_images_are_scored_as_the_model_does(
    http: aiohttp.ClientSession, models: dict[int, PreTrainedModel]
) -> None:
    prompts = many_prompts(np.random.default_rng(1))
    bodies = [encode(request_with(*prompt, max_tokens=12, seed=i)) for i, prompt in enumerate(prompts)]
    for _ in range(2):  # the second time from the caches
        for prompt, reply in zip(prompts, await asyncio.gather(*(generate(http, b) for b in bodies)), strict=True):
            assert_exact(models, prompt, reply)


async def test_images_that_do_not_fit_their_prompt_are_400_and_harm_nobody(
    http: aiohttp.ClientSession, models: dict[int, PreTrainedModel]
) -> None:
    tokens, images = prompt_with(np.random.default_rng(2), (2, 2))
    good = request_with(tokens, images)
    grids = EncodedTensor.of(np.array([[1, 2, 4], [1, 2, 4]], np.int64))
    two = request_with(tokens, images, mm_kwargs={**good.mm_kwargs, "image_grid_thw": grids})
    for request, reason in ((request_with(tokens, None), "mm_token_type_ids"), (two, "the images need")):
        async with http.post(GENERATE_PATH, data=encode(request)) as response:
            status, kind, message = await error_of(response)
        assert (status, kind) == (400, "invalid_request_error")
        assert reason in message
    assert_exact(models, (tokens, images), await generate(http, encode(good)))


async def test_new_weights_reach_the_vision_tower_with_requests_in_flight(
    http: aiohttp.ClientSession, server: Server, models: dict[int, PreTrainedModel], tmp_path: Path
) -> None:
    prompts = many_prompts(np.random.default_rng(3))
    bodies = [encode(request_with(*prompt, max_tokens=200, seed=i)) for i, prompt in enumerate(prompts)]
    tasks = [asyncio.create_task(generate(http, body)) for body in bodies]
    await until_health(http, "running", len(tasks))
    assert (await apply(http, server, publish(tmp_path, models[1], 1), 1))[0] == 200
    replies = await asyncio.gather(*tasks)
    assert {span.version for reply in replies for span in reply.versions} == {0, 1}
    for prompt, reply in zip(prompts, replies, strict=True):
        assert_exact(models, prompt, reply)
    for prompt in prompts:  # what the old vision tower made of these images is forgotten
        assert_exact(models, prompt, await generate(http, encode(request_with(*prompt, max_tokens=4))))
    assert (await served(http, server))["digest"] == model_digest(models[1])
