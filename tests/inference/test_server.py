"""The HTTP contract of docs/contracts.md, over a real socket."""

import asyncio
import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient
from prometheus_client import generate_latest
from transformers import PreTrainedModel

from inference.server.state import STATE
from inference.torch_engine.engine import TorchEngine
from inference.torch_engine.weights import model_digest
from tests.inference.conftest import ADMIN, running_client, running_engine
from tests.inference.gate import held
from tests.inference.tiny import VOCAB_SIZE, make_model, publish, score
from tests.support.waiting import until_async
from transport.codec import encode
from transport.generation import (
    GENERATE_PATH,
    MSGPACK,
    WEIGHTS_PATH,
    ApplyWeights,
    GenerateReply,
    GenerateRequest,
)
from transport.sample import VersionSpan
from transport.tensor import EncodedTensor

PROMPT = [5, 6, 7]


def body(tokens: list[int] = PROMPT, max_tokens: int = 8, **fields: object) -> bytes:
    ids = EncodedTensor.of(np.array(tokens, dtype=np.int32))
    request = GenerateRequest(request_id="r1", token_ids=ids, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    return encode(request)


async def error_of(response: ClientResponse) -> tuple[int, str, str]:
    error = (await response.json())["error"]
    return response.status, error["type"], error["message"]


async def test_generate_answers_msgpack_with_exact_logprobs(client: TestClient, model: PreTrainedModel) -> None:
    response = await client.post(GENERATE_PATH, data=body(seed=1, temperature=0.8))
    assert (response.status, response.content_type) == (200, MSGPACK)
    reply = msgspec.msgpack.decode(await response.read(), type=GenerateReply)
    assert (reply.request_id, reply.finish_reason) == ("r1", "length")
    assert reply.versions == (VersionSpan(0, 0, 8),)
    expected = score(model, PROMPT, reply.token_ids.numpy().tolist(), 0.8)
    torch.testing.assert_close(torch.tensor(reply.logprobs.numpy()), expected, atol=1e-5, rtol=0)


async def test_bad_requests_get_a_reason(client: TestClient) -> None:
    status, kind, message = await error_of(await client.post(GENERATE_PATH, data=body([VOCAB_SIZE])))
    assert (status, kind) == (400, "invalid_request_error")
    assert f"token id {VOCAB_SIZE}" in message
    assert (await error_of(await client.post(GENERATE_PATH, data=body([5] * 256))))[0] == 400
    assert (await error_of(await client.post(GENERATE_PATH, data=b"nonsense")))[0] == 400


async def test_unknown_route_and_oversized_body_are_json_errors(client: TestClient) -> None:
    assert (await error_of(await client.get("/nowhere")))[0] == 404
    assert (await error_of(await client.get(GENERATE_PATH)))[0] == 405
    assert (await error_of(await client.post(GENERATE_PATH, data=io.BytesIO(b"x" * (17 * 2**20)))))[0] == 413


async def test_health_says_what_is_served(client: TestClient, model: PreTrainedModel, model_dir: Path) -> None:
    response = await client.get("/health")
    assert response.status == 200
    report = await response.json()
    assert report["progress_age_s"] >= 0
    assert {key: report[key] for key in report if key != "progress_age_s"} == {
        "status": "ok",
        "engine": "torch",
        "model": model_dir.name,
        "version": 0,
        "digest": model_digest(model),
        "running": 0,
        "waiting": 0,
        "max_batch_size": 8,
        "max_model_len": 256,
        "vocab_size": VOCAB_SIZE,
        "waiting_for": "",
        "last_update": {},
    }


async def test_loading_server_answers_503(model_dir: Path) -> None:
    async with running_client(None, model_dir) as client:
        health = await client.get("/health")
        assert (health.status, (await health.json())["status"]) == (503, "loading")
        assert (await error_of(await client.post(GENERATE_PATH, data=body())))[:2] == (503, "unavailable")
        assert (await client.get(WEIGHTS_PATH, headers=ADMIN)).status == 503


async def test_dead_engine_shows_in_health(client: TestClient, engine: TorchEngine) -> None:
    engine.died(RuntimeError("boom"))
    health = await client.get("/health")
    assert (health.status, (await health.json())["status"]) == (503, "dead")
    status, _, message = await error_of(await client.post(GENERATE_PATH, data=body()))
    assert status == 503
    assert "boom" in message


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer sécret"}])
async def test_admin_routes_need_the_token(client: TestClient, headers: dict[str, str]) -> None:
    for method in ("GET", "POST"):
        assert (await error_of(await client.request(method, WEIGHTS_PATH, headers=headers)))[0] == 401


async def test_token_of_any_bytes_is_just_wrong(client: TestClient) -> None:
    reader, writer = await asyncio.open_connection(client.host, client.port)
    head = f"GET {WEIGHTS_PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode()
    writer.write(head + b"Authorization: Bearer \xff\xfe\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 401 ")
    writer.close()
    await writer.wait_closed()


async def test_admin_routes_are_off_without_a_token(engine: TorchEngine, model_dir: Path) -> None:
    async with running_client(engine, model_dir, token=None) as client:
        assert (await error_of(await client.get(WEIGHTS_PATH, headers=ADMIN)))[:2] == (403, "admin_disabled")
        assert (await client.post(WEIGHTS_PATH, headers={"Authorization": "Bearer None"})).status == 403


async def test_weights_are_applied_and_read_back(client: TestClient, tmp_path: Path) -> None:
    new = make_model(1)
    asked = ApplyWeights(manifest_path=str(publish(tmp_path, new, 4)), version=4)
    response = await client.post(WEIGHTS_PATH, data=msgspec.json.encode(asked), headers=ADMIN)
    expected = {"version": 4, "digest": model_digest(new)}
    answer = await response.json()
    assert (response.status, answer.pop("times").keys()) == (200, {"transfer_s", "pause_s", "apply_s"})
    assert answer == expected
    assert await (await client.get(WEIGHTS_PATH, headers=ADMIN)).json() == expected


async def test_corrupt_publish_is_409_and_the_old_weights_serve(
    client: TestClient, model: PreTrainedModel, tmp_path: Path
) -> None:
    path = publish(tmp_path, make_model(1), 1)
    shard = next(path.parent.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8] + b"\0" * 8)
    asked = msgspec.json.encode(ApplyWeights(manifest_path=str(path), version=1))
    status, kind, message = await error_of(await client.post(WEIGHTS_PATH, data=asked, headers=ADMIN))
    assert (status, kind) == (409, "weights_refused")
    assert "corrupt" in message
    assert (await (await client.get(WEIGHTS_PATH, headers=ADMIN)).json())["digest"] == model_digest(model)
    reply = msgspec.msgpack.decode(await (await client.post(GENERATE_PATH, data=body())).read(), type=GenerateReply)
    expected = score(model, PROMPT, reply.token_ids.numpy().tolist())
    torch.testing.assert_close(torch.tensor(reply.logprobs.numpy()), expected, atol=1e-5, rtol=0)


async def test_malformed_weight_update_is_400(client: TestClient) -> None:
    for data in (b"", b"{}", b'{"manifest_path": "x", "version": "new"}', b'{"manifest_path":"x","version":1,"z":1}'):
        assert (await error_of(await client.post(WEIGHTS_PATH, data=data, headers=ADMIN)))[0] == 400


async def test_full_queue_is_429_with_retry_after(model_dir: Path) -> None:
    async with running_engine(model_dir, slots=1, max_waiting=1) as engine, running_client(engine, model_dir) as client:
        async with held(engine):
            waiting = asyncio.create_task(client.post(GENERATE_PATH, data=body()))
            await until_async(lambda: engine.stats.waiting == 1, 60)
            refused = await client.post(GENERATE_PATH, data=body())
            assert (await error_of(refused))[:2] == (429, "queue_full")
            assert refused.headers["Retry-After"] == "1"
        assert (await waiting).status == 200


async def test_disconnect_frees_the_slot(client: TestClient, engine: TorchEngine) -> None:
    async with held(engine):
        request = asyncio.create_task(client.post(GENERATE_PATH, data=body(max_tokens=200)))
        await until_async(lambda: engine.stats.waiting == 1, 60)
        request.cancel()
        await until_async(lambda: engine.stats.waiting == 0, 60)
    assert (await client.post(GENERATE_PATH, data=body(max_tokens=2))).status == 200
    assert engine.stats.sampled_tokens == 1 + 2


async def test_request_beyond_the_deadline_is_504_and_frees_its_slot(engine: TorchEngine, model_dir: Path) -> None:
    async with running_client(engine, model_dir, timeout_s=0.2) as client, held(engine):
        assert (await error_of(await client.post(GENERATE_PATH, data=body())))[:2] == (504, "deadline_exceeded")
        assert engine.stats.waiting == 0


async def test_metrics_count_requests_and_updates(client: TestClient, tmp_path: Path) -> None:
    await client.post(GENERATE_PATH, data=body())
    await client.post(GENERATE_PATH, data=b"nonsense")
    asked = ApplyWeights(manifest_path=str(publish(tmp_path, make_model(1), 3)), version=3)
    await client.post(WEIGHTS_PATH, data=msgspec.json.encode(asked), headers=ADMIN)
    text = generate_latest(client.app[STATE].metrics.registry).decode()  # type: ignore[index]
    for line in (
        f'tandem_inference_requests_total{{route="{GENERATE_PATH}",status="200"}} 1.0',
        f'tandem_inference_requests_total{{route="{GENERATE_PATH}",status="400"}} 1.0',
        'tandem_inference_weight_updates_total{outcome="applied"} 1.0',
    ):
        assert line in text


async def test_128_requests_at_once_are_all_answered(model_dir: Path) -> None:
    async with running_engine(model_dir, slots=64, max_waiting=128) as engine:
        async with running_client(engine, model_dir) as client:
            bodies = [body([5 + i % 30] * (1 + i % 9), 16) for i in range(128)]
            replies = await asyncio.gather(*(client.post(GENERATE_PATH, data=data) for data in bodies))
            assert {reply.status for reply in replies} == {200}
        assert engine.stats.sampled_tokens == 128 * 16
