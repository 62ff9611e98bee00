"""What the torch engine's server has beyond the contract (`test_engine_contract.py`), over a real socket."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient
from prometheus_client import generate_latest

from inference.server.state import STATE
from inference.torch_engine.engine import TorchEngine
from tests.inference.conftest import ADMIN, running_client, running_engine
from tests.inference.gate import held
from tests.support.models import make_model, publish
from tests.support.waiting import until_async
from transport.wire.codec import encode
from transport.wire.generation import GENERATE_PATH, WEIGHTS_PATH, ApplyWeights, GenerateRequest
from transport.wire.tensor import EncodedTensor


def body() -> bytes:
    ids = EncodedTensor.of(np.array([5, 6, 7], dtype=np.int32))
    return encode(GenerateRequest(request_id="r1", token_ids=ids, max_tokens=8))


async def error_of(response: ClientResponse) -> tuple[int, str, str]:
    error = (await response.json())["error"]
    return response.status, error["type"], error["message"]


async def test_unknown_route_and_method_are_json_errors(client: TestClient) -> None:
    assert (await error_of(await client.get("/nowhere")))[0] == 404
    assert (await error_of(await client.get(GENERATE_PATH)))[0] == 405


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


async def test_full_queue_is_429_with_retry_after(model_dir: Path) -> None:
    async with running_engine(model_dir, slots=1, max_waiting=1) as engine, running_client(engine, model_dir) as client:
        async with held(engine):
            waiting = asyncio.create_task(client.post(GENERATE_PATH, data=body()))
            await until_async(lambda: engine.stats.waiting == 1, 60)
            refused = await client.post(GENERATE_PATH, data=body())
            assert (await error_of(refused))[:2] == (429, "queue_full")
            assert refused.headers["Retry-After"] == "1"
        assert (await waiting).status == 200


async def test_request_beyond_the_deadline_is_504_and_frees_its_slot(engine: TorchEngine, model_dir: Path) -> None:
    async with running_client(engine, model_dir, timeout_s=0.2) as client, held(engine):
        assert (await error_of(await client.post(GENERATE_PATH, data=body())))[:2] == (504, "deadline_exceeded")
        assert engine.stats.waiting == 0


async def test_metrics_count_requests_and_updates(client: TestClient, tmp_path: Path) -> None:
    await client.post(GENERATE_PATH, data=body())
    await client.post(GENERATE_PATH, data=b"nonsense")
    asked = ApplyWeights(location=str(publish(tmp_path, make_model(1), 3)), version=3)
    await client.post(WEIGHTS_PATH, data=msgspec.json.encode(asked), headers=ADMIN)
    text = generate_latest(client.app[STATE].metrics.registry).decode()  # type: ignore[index]
    for line in (
        f'tandem_inference_requests_total{{route="{GENERATE_PATH}",status="200"}} 1.0',
        f'tandem_inference_requests_total{{route="{GENERATE_PATH}",status="400"}} 1.0',
        'tandem_inference_weight_updates_total{outcome="applied"} 1.0',
    ):
        assert line in text
