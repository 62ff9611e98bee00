"""The service as a process: start, serve, swap, stop, and every way to fail."""

import asyncio
import json
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from inference.service import until_stopped
from inference.torch_engine.engine import TorchEngine
from inference.weights.publish import model_digest
from runtime.errors import ExitCode, ServiceError
from tests.inference.contract_server import ServerProcess, server_process
from tests.support.models import make_model, publish, score
from tests.support.waiting import until
from transport.wire.codec import encode
from transport.wire.generation import GENERATE_PATH, WEIGHTS_PATH, ApplyWeights, GenerateReply, GenerateRequest
from transport.wire.sample import EncodedTensor


def body(max_tokens: int = 8) -> bytes:
    ids = EncodedTensor.of(np.array([5, 6, 7], dtype=np.int32))
    return encode(GenerateRequest(request_id="r", token_ids=ids, max_tokens=max_tokens, stop_token_ids=()))


@pytest.mark.integration
def test_server_serves_swaps_and_answers_what_is_in_flight_at_sigterm(tmp_path: Path, model_dir: Path) -> None:
    new = make_model(1)
    with server_process(tmp_path, model_dir, "--torch.max-batch-size", "1", "--server.grace-s", "60") as server:
        assert json.loads(server.request("/health")[1])["status"] == "ok"
        asked = ApplyWeights(location=str(publish(tmp_path / "weights", new, 1)), version=1)
        status, served = server.request(WEIGHTS_PATH, msgspec.json.encode(asked))
        answer = json.loads(served)
        assert (status, answer["version"], answer["digest"]) == (200, 1, model_digest(new))
        status, data = server.request(GENERATE_PATH, body())
        reply = msgspec.msgpack.decode(data, type=GenerateReply)
        expected = score(new, [5, 6, 7], reply.token_ids.numpy().tolist())
        torch.testing.assert_close(torch.tensor(reply.logprobs.numpy()), expected, atol=1e-5, rtol=0)
        assert_watched(server, version=1, num_sampled=reply.token_ids.shape[0])
        answers = server.leave_requests(body(250), 8)
        code = server.stop()
    assert (code, "Traceback" in server.output) == (0, False)
    assert [answers.get(timeout=30)[0] for _ in range(8)] == [200] * 8
    assert not (server.run_dir.services / "inference.json").exists()
    [row] = [json.loads(line) for line in (server.run_dir.metrics / "inference.jsonl").read_text().splitlines()]
    assert row["step"] == 1


def assert_watched(server: ServerProcess, version: int, num_sampled: int) -> None:
    """The health endpoint has both probes, and metrics of the engine and of its HTTP server."""
    url = server.run_dir.read_services()["inference"].addresses["health"]
    until(lambda: answer_of(url, "/metrics").count(f"tandem_inference_now_sampled_tokens {num_sampled}.0") == 1)
    assert answer_of(url, "/live") == answer_of(url, "/ready") == '{"status": "ok"}'
    for line in (
        f"tandem_inference_now_version {version}.0",
        f'tandem_inference_requests_total{{route="{GENERATE_PATH}",status="200"}} 1.0',
        'tandem_inference_weight_updates_total{outcome="applied"} 1.0',
    ):
        assert line in answer_of(url, "/metrics")


def answer_of(health_url: str, path: str) -> str:
    with urllib.request.urlopen(health_url.replace("/health", path), timeout=10) as response:
        return str(response.read().decode())


@pytest.mark.integration
def test_request_that_outlasts_the_grace_is_told_so(tmp_path: Path, model_dir: Path) -> None:
    with server_process(tmp_path, model_dir, "--torch.max-batch-size", "1", "--server.grace-s", "0.1") as server:
        answers = server.leave_requests(body(250), 32)
        assert server.stop() == 0
    given_up = [answer for answer in (answers.get(timeout=30) for _ in range(32)) if answer[0] != 200]
    assert {status for status, _ in given_up} == {503}
    assert all(b"stopping" in reason for _, reason in given_up)


@pytest.mark.integration
def test_model_that_cannot_be_served_is_one_line_and_exit_code_2(tmp_path: Path, model_dir: Path) -> None:
    with server_process(tmp_path, model_dir, "--torch.max-model-len", "4096") as server:
        assert server.wait() == 2
    assert "above the 512 positions" in server.output
    assert "Traceback" not in server.output


async def test_death_of_the_engine_ends_the_service_with_the_reason(engine: TorchEngine) -> None:
    waiting = asyncio.create_task(until_stopped(engine, asyncio.Event()))
    engine.died(RuntimeError("out of memory"))
    with pytest.raises(ServiceError, match=r"the engine died.*out of memory") as caught:
        await asyncio.wait_for(waiting, 60)
    assert caught.value.exit_code == ExitCode.FAILED


async def test_stop_signal_ends_the_service_without_an_error(engine: TorchEngine) -> None:
    stop = asyncio.Event()
    waiting = asyncio.create_task(until_stopped(engine, stop))
    stop.set()
    await asyncio.wait_for(waiting, 60)
