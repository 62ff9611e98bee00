"""Many clients and disconnects at once, over HTTP: nothing is lost, nothing is wrong."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import torch
from aiohttp.test_utils import TestClient
from transformers import PreTrainedModel

from tests.inference.conftest import running_client, running_engine
from tests.support.models import score
from tests.support.waiting import until_async
from transport.wire.codec import encode
from transport.wire.generation import GENERATE_PATH, GenerateReply, GenerateRequest
from transport.wire.tensor import EncodedTensor


def prompt(number: int) -> list[int]:
    return [5 + (number + i) % 30 for i in range(1 + number % 23)]


async def generate(client: TestClient, number: int, max_tokens: int) -> GenerateReply:
    ids = EncodedTensor.of(np.array(prompt(number), dtype=np.int32))
    request = GenerateRequest(request_id=str(number), token_ids=ids, max_tokens=max_tokens, seed=number)
    response = await client.post(GENERATE_PATH, data=encode(request))
    assert response.status == 200, await response.text()
    return msgspec.msgpack.decode(await response.read(), type=GenerateReply)


def assert_exact(models: dict[int, PreTrainedModel], reply: GenerateReply) -> None:
    tokens = reply.token_ids.numpy().tolist()
    assert sum(span.end - span.start for span in reply.versions) == len(tokens)
    for span in reply.versions:
        expected = score(models[span.version], prompt(int(reply.request_id)), tokens)[span.start : span.end]
        ours = torch.tensor(reply.logprobs.numpy()[span.start : span.end])
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)


async def test_storm_of_disconnects_leaves_an_idle_engine(model_dir: Path, model: PreTrainedModel) -> None:
    async with (
        running_engine(model_dir, slots=8, max_waiting=256) as engine,
        running_client(engine, model_dir) as client,
    ):
        dropped = [asyncio.create_task(generate(client, number, 200)) for number in range(100)]
        await until_async(lambda: engine.stats.running == 8, 60)
        for task in dropped:
            task.cancel()
        await asyncio.wait(dropped, timeout=60)
        await until_async(lambda: engine.stats.running == engine.stats.waiting == 0, 60)
        sampled = engine.stats.sampled_tokens
        assert sampled < 100 * 200
        assert_exact({0: model}, await generate(client, 7, 10))
        assert engine.stats.sampled_tokens == sampled + 10


async def test_bursts_leave_nothing_behind(model_dir: Path) -> None:
    async with (
        running_engine(model_dir, slots=8, max_waiting=64) as engine,
        running_client(engine, model_dir) as client,
    ):
        for burst in range(5):
            await asyncio.gather(*(generate(client, number, 1 + number % 4) for number in range(40)))
            assert engine.stats.running == engine.stats.waiting == 0, burst
        assert engine.stats.sampled_tokens == 5 * sum(1 + number % 4 for number in range(40))
