"""A client of the HTTP contract (docs/contracts.md) for the suites that run against every engine."""

import asyncio
import time
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from tests.inference.contract_server import Server
from tests.support.models import score
from transport.wire.codec import encode
from transport.wire.generation import GENERATE_PATH, MSGPACK, WEIGHTS_PATH, ApplyWeights, GenerateReply, GenerateRequest
from transport.wire.tensor import EncodedTensor

PROMPT = [5, 6, 7, 8]
TOLERANCE = 1e-4
"""What the issue asks for; both engines are at about 1e-6 in float32."""


def body(tokens: list[int] = PROMPT, max_tokens: int = 8, request_id: str = "r1", **fields: object) -> bytes:
    ids = EncodedTensor.of(np.array(tokens, dtype=np.int32))
    return encode(GenerateRequest(request_id=request_id, token_ids=ids, max_tokens=max_tokens, **fields))  # type: ignore[arg-type]


async def generate(http: aiohttp.ClientSession, data: bytes) -> GenerateReply:
    async with http.post(GENERATE_PATH, data=data) as response:
        assert (response.status, response.content_type) == (200, MSGPACK), await response.text()
        return msgspec.msgpack.decode(await response.read(), type=GenerateReply)


async def apply(
    http: aiohttp.ClientSession, server: Server, location: Path | str, version: int
) -> tuple[int, dict[str, object]]:
    order = ApplyWeights(location=str(location), version=version)
    async with http.post(WEIGHTS_PATH, data=msgspec.json.encode(order), headers=server.admin) as response:
        return response.status, await response.json()


async def served(http: aiohttp.ClientSession, server: Server) -> dict[str, object]:
    async with http.get(WEIGHTS_PATH, headers=server.admin) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, object] = await response.json()
        return answer


async def health(http: aiohttp.ClientSession) -> dict[str, object]:
    async with http.get("/health") as response:
        report: dict[str, object] = await response.json()
        return report


async def until_health(http: aiohttp.ClientSession, key: str, value: object, within_s: float = 60) -> dict[str, object]:
    """Poll until the report has `value` at `key`."""
    deadline = time.monotonic() + within_s
    while (report := await health(http))[key] != value:
        assert time.monotonic() < deadline, f"{key} did not become {value}: {report}"
        await asyncio.sleep(0.01)
    return report


async def until_begun(http: aiohttp.ClientSession, tasks: "list[asyncio.Task[GenerateReply]]") -> None:
    """Return when the server has taken all of these requests; some may have ended."""
    deadline = time.monotonic() + 60
    while True:
        num_ended = sum(task.done() for task in tasks)
        report = await health(http)
        if num_ended + report["running"] + report["waiting"] >= len(tasks):  # type: ignore[operator]
            return
        assert time.monotonic() < deadline, report
        await asyncio.sleep(0.01)


async def error_of(response: aiohttp.ClientResponse) -> tuple[int, str, str]:
    error = (await response.json())["error"]
    return response.status, error["type"], error["message"]


def assert_exact(models: dict[int, PreTrainedModel], prompt: list[int], reply: GenerateReply, t: float = 1.0) -> None:
    """Every token has the log probability that the version of its span gives it."""
    tokens, logprobs = reply.token_ids.numpy().tolist(), torch.tensor(reply.logprobs.numpy())
    assert [span.start for span in reply.versions] == [0, *(span.end for span in reply.versions[:-1])]
    assert reply.versions[-1].end == len(tokens) == len(logprobs)
    for span in reply.versions:
        expected = score(models[span.version], prompt, tokens, t)[span.start : span.end]
        torch.testing.assert_close(logprobs[span.start : span.end], expected, atol=TOLERANCE, rtol=0)
