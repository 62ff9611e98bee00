"""Requests with images over a real socket, and what is done with them where images cannot go."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
from aiohttp import web

from chat.images.patches import ImagePatches
from chat.trajectory import Branch
from orchestrator.config.engines import EnginesConfig
from orchestrator.engines.http_client import MAX_UPLOADS, Uploads
from orchestrator.engines.http_engine import HttpEngine
from orchestrator.engines.protocol import Engine, EngineError, EngineLoad, InvalidResponse
from orchestrator.engines.sglang import SglangClient
from orchestrator.teachers.scored_env import ScoredEnv
from tests.chat.replies import make_reply
from tests.orchestrator.engine_server import TOKEN, VOCAB_SIZE, EngineServer, Misbehave, dead, serving
from tests.support.waiting import until_async
from transport.wire.generation import GenerateReply, GenerateRequest, ServedWeights, UpdateTimes
from transport.wire.sample import EncodedTensor


def ask(seed: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r-{seed}", token_ids=EncodedTensor.of(np.arange(5, dtype=np.int32)), max_tokens=6, seed=seed
    )


@asynccontextmanager
async def connected(*servers: EngineServer, **options: float) -> AsyncIterator[HttpEngine]:
    settings = {"start_timeout_s": 5, "request_timeout_s": 5, "update_timeout_s": 5} | options
    engine = HttpEngine(EnginesConfig(urls=tuple(server.url for server in servers), **settings), TOKEN)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def status(code: int, **headers: str) -> Misbehave:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "told to", "type": "test"}}, status=code, headers=headers)

    return answer


async def reset(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


async def trickle(request: web.Request) -> web.StreamResponse:
    """Headers at once, then a byte now and then: no single read ever times out."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"x")
        await asyncio.sleep(0.02)


def sends(body: bytes) -> Misbehave:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body)

    return answer


async def test_reply_is_the_engines() -> None:
    async with serving(EngineServer()) as server, connected(server) as engine:
        as_protocol: Engine = engine
        reply = await as_protocol.generate(ask(3))
        expected = await server.engine.generate(ask(3))
    assert reply.token_ids.numpy().tolist() == expected.token_ids.numpy().tolist()
    assert reply.logprobs.numpy().tolist() == expected.logprobs.numpy().tolist()
    assert reply.versions == expected.versions


@pytest.mark.parametrize("fault", [status(500), status(503), status(429), reset], ids=["500", "503", "429", "reset"])
async def test_passing_fault_is_retried(fault: Misbehave) -> None:
    async with serving(EngineServer(misbehaviours=[fault, fault])) as server, connected(server) as engine:
        reply = await engine.generate(ask())
        assert reply.request_id == "r-0"
        assert server.num_generate == 3
        assert not any(replica.num_in_flight for replica in engine._pool.replicas)


async def test_retry_after_is_honoured() -> None:
    async with (
        serving(EngineServer(misbehaviours=[status(429, **{"Retry-After": "0.4"})])) as server,
        connected(server) as engine,
    ):
        started = time.monotonic()
        await engine.generate(ask())
    assert time.monotonic() - started >= 0.4


async def test_fault_that_stays_is_an_engine_error_after_all_retries() -> None:
    async with (
        serving(EngineServer(misbehaviours=[status(500)] * 9)) as server,
        connected(server, max_retries=2) as engine,
    ):
        with pytest.raises(EngineError, match=r"answered 500: .*told to"):
            await engine.generate(ask())
        assert server.num_generate == 3


@pytest.mark.parametrize("code", [400, 404, 413])
async def test_refusal_is_not_retried(code: int) -> None:
    async with serving(EngineServer(misbehaviours=[status(code)])) as server, connected(server) as engine:
        with pytest.raises(EngineError, match=f"answered {code}"):
            await engine.generate(ask())
        assert server.num_generate == 1


@pytest.mark.parametrize("fault", [hang, trickle], ids=["hang", "trickle"])
async def test_slow_engine_meets_the_deadline_and_is_retried(fault: Misbehave) -> None:
    async with (
        serving(EngineServer(misbehaviours=[fault])) as server,
        connected(server, request_timeout_s=0.3) as engine,
    ):
        await engine.generate(ask())
        assert server.num_generate == 2


async def test_slow_engine_is_named_when_no_try_is_left() -> None:
    async with (
        serving(EngineServer(misbehaviours=[hang])) as server,
        connected(server, request_timeout_s=0.2, max_retries=0) as engine,
    ):
        with pytest.raises(EngineError, match=r"r-0: http://127.0.0.1:\d+/.* did not answer within 0.2 s"):
            await engine.generate(ask())


GARBAGE = {
    "bytes": b"\x00\xffgarbage",
    "empty": b"",
    "json": b'{"error": null}',
    "missing logprobs": msgspec.msgpack.encode({"request_id": "r-0", "token_ids": ["int32", [0], b""]}),
    "deeply nested": b"\x91" * 100_000,
    "nan": msgspec.msgpack.encode(
        msgspec.structs.replace(
            make_reply([1, 2], request_id="r-0"), logprobs=EncodedTensor.of(np.array([np.nan, -1], np.float32))
        )
    ),
    "id outside the vocabulary": msgspec.msgpack.encode(make_reply([VOCAB_SIZE], request_id="r-0")),
    "length mismatch": msgspec.msgpack.encode(
        msgspec.structs.replace(make_reply([1, 2], request_id="r-0"), token_ids=EncodedTensor.of(np.ones(3, np.int32)))
    ),
    "other request": msgspec.msgpack.encode(make_reply([1], request_id="r-1")),
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_is_an_invalid_response_and_not_retried(kind: str) -> None:
    async with serving(EngineServer(misbehaviours=[sends(GARBAGE[kind])])) as server, connected(server) as engine:
        with pytest.raises(InvalidResponse, match="r-0"):
            await engine.generate(ask())
        assert server.num_generate == 1


async def test_requests_spread_over_all_engines() -> None:
    async with serving(EngineServer()) as one, serving(EngineServer()) as two, connected(one, two) as engine:
        await asyncio.gather(*(engine.generate(ask(seed)) for seed in range(20)))
        assert one.num_generate == two.num_generate == 10


async def test_dead_engine_is_survived_by_another() -> None:
    async with serving(EngineServer()) as alive:
        async with serving(EngineServer()) as dying:
            engine = HttpEngine(EnginesConfig(urls=(dying.url, alive.url), request_timeout_s=5, start_timeout_s=5))
            await engine.start()
        try:
            replies = await asyncio.gather(*(engine.generate(ask(seed)) for seed in range(8)))
        finally:
            await engine.close()
    assert {reply.request_id for reply in replies} == {f"r-{seed}" for seed in range(8)}
    assert alive.num_generate == 8


async def test_start_waits_for_an_engine_that_loads() -> None:
    async with serving(EngineServer(num_loading=2)) as server, connected(server):
        assert server.num_loading == 0


async def test_start_gives_up_at_the_deadline_and_names_the_engine() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    engine = HttpEngine(EnginesConfig(urls=(url,), start_timeout_s=0.5))
    with pytest.raises(EngineError, match=rf"engine {url} is not ready after 0.5 s: .*did not answer"):
        await engine.start()
    await engine.close()


async def test_engines_with_different_vocabularies_are_refused() -> None:
    async with serving(EngineServer()) as one, serving(EngineServer(vocab_size=99)) as two:
        with pytest.raises(EngineError, match=r"different vocabularies: \[64, 99\]"):
            async with connected(one, two):
                pass


async def test_weights_are_applied_on_all_engines_and_read_back() -> None:
    async with serving(EngineServer()) as one, serving(EngineServer()) as two, connected(one, two) as engine:
        await engine.apply_weights("/weights/v4/manifest.json", 4, "digest-4")
        assert await engine.served() == ServedWeights(version=4, digest="digest-4")
        assert one.engine.weights == two.engine.weights


async def test_times_are_of_this_update_and_of_those_who_had_to_load() -> None:
    async with serving(EngineServer()) as one, serving(EngineServer()) as two, connected(one, two) as engine:
        slowest = await engine.apply_weights("/weights/v4/manifest.json", 4, "digest-4")
        assert slowest == UpdateTimes(transfer_s=4.0, pause_s=0.0, apply_s=0.5)
        assert await engine.apply_weights("/weights/v4/manifest.json", 4, "digest-4") is None


async def test_engine_that_says_yes_and_serves_the_old_version_is_found_out() -> None:
    liar = EngineServer(lies_about_weights=True)
    async with serving(EngineServer()) as honest, serving(liar), connected(honest, liar) as engine:
        with pytest.raises(EngineError, match=rf"{liar.url} should serve version 4 .*, serves version 0"):
            await engine.apply_weights("/weights/v4/manifest.json", 4, "digest-4")
        with pytest.raises(EngineError, match="disagree"):
            await engine.served()


async def test_wrong_digest_is_not_accepted() -> None:
    async with serving(EngineServer()) as server, connected(server) as engine:
        with pytest.raises(EngineError, match="digest-4"):
            await engine.apply_weights("/weights/v4/manifest.json", 4, "another digest")


async def test_refused_publish_names_the_reason() -> None:
    async with serving(EngineServer()) as server, connected(server) as engine:
        with pytest.raises(EngineError, match=r"409: .*hash mismatch"):
            await engine.apply_weights("corrupt", 4, "digest-4")


async def test_wrong_admin_token_is_an_engine_error() -> None:
    async with serving(EngineServer()) as server:
        engine = HttpEngine(EnginesConfig(urls=(server.url,), start_timeout_s=5), "wrong")
        await engine.start()
        with pytest.raises(EngineError, match="403"):
            await engine.apply_weights("/weights/v4/manifest.json", 4, "digest-4")
        await engine.close()


async def test_cancelled_request_leaves_nothing_behind() -> None:
    async with serving(EngineServer(misbehaviours=[hang])) as server, connected(server) as engine:
        task = asyncio.create_task(engine.generate(ask()))
        await until_async(lambda: server.num_generate)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(replica.num_in_flight for replica in engine._pool.replicas)


async def test_closed_engine_says_so_and_closes_twice() -> None:
    async with serving(EngineServer()) as server, connected(server) as engine:
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(ask())


class BusyServer(EngineServer):
    """Says what the contract wants to be said."""

    async def health(self, request: web.Request) -> web.Response:
        load = {"running": 3, "waiting": 2, "max_batch_size": 4}
        return web.json_response({"status": "ok", "vocab_size": self.vocab_size, **load})


async def started(*servers: EngineServer) -> HttpEngine:
    engine = HttpEngine(EnginesConfig(urls=tuple(server.url for server in servers), start_timeout_s=5.0))
    await engine.start()
    return engine


async def test_loads_of_the_engines_in_service_add_up() -> None:
    async with serving(BusyServer()) as first, serving(BusyServer()) as second:
        engine = await started(first, second)
        assert await engine.load() == EngineLoad(num_running=6, num_waiting=4, capacity=8)
        await engine.close()


async def test_an_engine_that_does_not_tell_its_load_has_none() -> None:
    async with serving(EngineServer()) as server:
        engine = await started(server)
        assert await engine.load() == EngineLoad()
        await engine.close()


async def test_an_engine_that_is_gone_is_an_error() -> None:
    async with serving(BusyServer()) as server:
        engine = await started(server)
        async with dead(server):
            with pytest.raises(EngineError, match=r"/health did not answer"):
                await engine.load()
        await engine.close()


PIXELS = np.random.default_rng(0).random((4096, 48), dtype=np.float32)

IMAGES = ImagePatches(("d",), EncodedTensor.of(PIXELS), EncodedTensor.of(np.array([[1, 64, 64]], np.int64)))


def ask_with_image() -> GenerateRequest:
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
        await engine.generate(ask_with_image())
    (request,) = seen
    assert request.mm_kwargs["pixel_values"].shape == PIXELS.shape
    assert bytes(request.mm_kwargs["pixel_values"].data) == PIXELS.tobytes()
    assert request.mm_token_type_ids == ask_with_image().mm_token_type_ids


async def test_sglang_gets_no_images() -> None:
    client = SglangClient(None, "http://127.0.0.1:9", None, 8)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="images are not supported"):
        await client.sample(ask_with_image(), 1.0)


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
