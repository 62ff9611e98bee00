"""Requests with images over a real socket, and what is done with them where images cannot go."""

import asyncio

import numpy as np
import pytest

from chat.branch import Branch, ImagePatches
from orchestrator.engines.http_client import MAX_UPLOADS, Uploads
from orchestrator.engines.protocol import EngineError
from orchestrator.engines.sglang import SglangClient
from orchestrator.teachers.scored_env import ScoredEnv
from tests.orchestrator.engine_server import EngineServer, serving
from tests.orchestrator.engines.test_http_engine import connected, status
from transport.wire.generation import GenerateReply, GenerateRequest
from transport.wire.tensor import EncodedTensor

PIXELS = np.random.default_rng(0).random((4096, 48), dtype=np.float32)
IMAGES = ImagePatches(("d",), EncodedTensor.of(PIXELS), EncodedTensor.of(np.array([[1, 64, 64]], np.int64)))


def ask() -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        token_ids=EncodedTensor.of(np.array([3, 4], np.int32)),
        max_tokens=4,
        mm_kwargs=IMAGES.mm_kwargs,
        mm_token_type_ids=EncodedTensor.of(np.array([1, 0], np.uint8)),
    )


async def test_images_arrive_whole_also_at_the_second_try() -> None:
    server = EngineServer(misbehaviours=[status(503)])
    seen: list[GenerateRequest] = []
    generate = server.engine.generate

    async def remember(request: GenerateRequest) -> GenerateReply:
        seen.append(request)
        return await generate(request)

    server.engine.generate = remember  # type: ignore[method-assign]
    async with serving(server), connected(server) as engine:
        await engine.generate(ask())
    (request,) = seen
    assert request.mm_kwargs["pixel_values"].shape == PIXELS.shape
    assert bytes(request.mm_kwargs["pixel_values"].data) == PIXELS.tobytes()
    assert request.mm_token_type_ids == ask().mm_token_type_ids


async def test_sglang_gets_no_images() -> None:
    client = SglangClient(None, "http://127.0.0.1:9", None, 8)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="images are not supported"):
        await client.sample(ask(), 1.0)


async def test_teachers_score_no_images() -> None:
    branch = Branch(
        token_ids=np.array([3, 4], np.int32),
        sampled=np.array([False, True]),
        logprobs=np.zeros(2, np.float32),
        versions=(),
        images=IMAGES,
        token_types=np.array([1, 0], np.uint8),
    )
    env = ScoredEnv.__new__(ScoredEnv)  # it must not get as far as its teacher
    with pytest.raises(EngineError, match="teachers do not score"):
        await env._score("t/0", branch, 1.0)


async def test_few_requests_with_images_are_in_memory_at_a_time() -> None:
    uploads = Uploads()
    pixels = {"pixel_values": EncodedTensor.of(np.zeros(8, np.float32))}
    ids = EncodedTensor.of(np.zeros(1, np.int32))
    request = GenerateRequest(request_id="r", token_ids=ids, max_tokens=1, mm_kwargs=pixels)
    bodies = [uploads.body(request) for _ in range(MAX_UPLOADS + 1)]
    for body in bodies[:-1]:
        assert not isinstance(body, bytes)
        await anext(body)
    waiting = asyncio.ensure_future(anext(bodies[-1]))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert not waiting.done()
    await bodies[0].aclose()  # type: ignore[union-attr]
    assert await asyncio.wait_for(waiting, 30)
    for body in bodies[1:]:
        await body.aclose()  # type: ignore[union-attr]
    assert isinstance(uploads.body(GenerateRequest(request_id="r", token_ids=ids, max_tokens=1)), bytes)
