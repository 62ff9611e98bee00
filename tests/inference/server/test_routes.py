"""What the torch engine's server has beyond the contract (`test_engine_contract.py`), over a real socket.

OpenAI's chat completions over the engine.

Many clients and disconnects at once, over HTTP: nothing is lost, nothing is wrong.
"""

import asyncio
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient
from prometheus_client import generate_latest
from transformers import PreTrainedModel

from inference.api.chat_reply import Json, events_of
from inference.server.routes import STATE
from inference.torch_engine.engine import TorchEngine
from tests.inference.conftest import ADMIN, running_client, running_engine
from tests.inference.gate import held
from tests.support.models import make_model, make_tokenizer, publish, score
from tests.support.waiting import until_async
from transport.wire.codec import encode
from transport.wire.generation import GENERATE_PATH, WEIGHTS_PATH, ApplyWeights, GenerateReply, GenerateRequest
from transport.wire.sample import EncodedTensor


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


MESSAGES = [{"role": "user", "content": "hello there"}]


async def chat(client: TestClient, **fields: object) -> dict[str, object]:
    response = await client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 12} | fields)
    reply: dict[str, object] = await response.json()
    assert response.status == 200, reply
    return reply


async def refusal(client: TestClient, **fields: object) -> tuple[int, str]:
    response = await client.post("/v1/chat/completions", json={"messages": MESSAGES} | fields)
    return response.status, (await response.json())["error"]["message"]


async def test_chat_reply_has_openais_shape(client: TestClient) -> None:
    reply = await chat(client, model="tiny", seed=3)
    [choice] = reply["choices"]
    prompt = make_tokenizer().apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "tiny"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert reply["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 12,
        "total_tokens": len(prompt) + 12,
    }


async def test_token_ids_and_logprobs_are_those_of_the_model(client: TestClient, model: PreTrainedModel) -> None:
    reply = await chat(client, seed=3, logprobs=True, top_logprobs=2, return_token_ids=True)
    [choice] = reply["choices"]
    tokenizer = make_tokenizer()
    assert reply["prompt_token_ids"] == tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    assert choice["message"]["content"] == tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 12}]
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == choice["token_ids"]
    expected = score(model, reply["prompt_token_ids"], choice["token_ids"])
    assert [entry["logprob"] for entry in entries] == pytest.approx(expected.tolist(), abs=1e-5)
    for entry in entries:
        best, second = entry["top_logprobs"]
        assert best["logprob"] >= second["logprob"]
        assert bytes(entry["bytes"]).decode() == entry["token"] == tokenizer.decode([entry["token_id"]])


async def test_n_choices_differ_and_a_seed_repeats_them(client: TestClient) -> None:
    first = await chat(client, n=3, seed=5, return_token_ids=True)
    again = await chat(client, n=3, seed=5, return_token_ids=True)
    tokens = [choice["token_ids"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert len({tuple(one) for one in tokens}) == 3
    assert tokens == [choice["token_ids"] for choice in again["choices"]]


async def test_stop_string_ends_the_text_before_it(client: TestClient, engine: TorchEngine) -> None:
    [free] = (await chat(client, seed=4, max_tokens=40))["choices"]
    text = free["message"]["content"]
    stop = text[5:7]
    before = engine.stats.sampled_tokens
    [stopped] = (await chat(client, seed=4, max_tokens=40, stop=[stop, "nowhere at all"]))["choices"]
    assert stopped["finish_reason"] == "stop"
    assert stopped["message"]["content"] == text[: text.index(stop)]
    assert engine.stats.sampled_tokens - before < 40


async def test_stop_token_is_not_part_of_the_text(client: TestClient) -> None:
    [free] = (await chat(client, seed=4, return_token_ids=True))["choices"]
    stop = next(token for token in free["token_ids"] if token > 4)
    [stopped] = (await chat(client, seed=4, stop_token_ids=[stop], return_token_ids=True))["choices"]
    assert stopped["finish_reason"] == "stop"
    assert stopped["token_ids"][-1] == stop
    assert make_tokenizer().decode([stop]) not in stopped["message"]["content"]


async def test_greedy_and_text_parts(client: TestClient) -> None:
    plain = await chat(client, temperature=0)
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": " there"}]
    split = await chat(client, temperature=0, messages=[{"role": "user", "content": parts}])
    assert plain["choices"] == split["choices"]


async def test_without_max_tokens_the_model_length_is_the_limit(client: TestClient) -> None:
    reply = await chat(client, max_tokens=None, seed=1)
    assert reply["usage"]["total_tokens"] == 256


async def test_stream_carries_the_same_text_and_ends_with_done(client: TestClient) -> None:
    [whole] = (await chat(client, seed=9))["choices"]
    fields = {"seed": 9, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 12}
    response = await client.post("/v1/chat/completions", json={"messages": MESSAGES} | fields)
    assert response.content_type == "text/event-stream"
    lines = [line for line in (await response.text()).split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == whole["message"]["content"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"model": "gpt-4"}, 404, "'gpt-4' is not served here"),
        ({"messages": []}, 400, "messages is empty"),
        ({"messages": "hi"}, 400, "not a valid ChatRequest"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "must be text"),
        ({"messages": [{"role": "user", "content": "a" * 300}]}, 400, "leaves no room"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"n": 0}, 400, "n must be"),
        ({"stop": ""}, 400, "stop string is empty"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"top_logprobs": 2}, 400, "needs logprobs"),
        ({"tools": [{"type": "function"}]}, 400, "tools is not supported"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty is not supported"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias is not supported"),
    ],
)
async def test_bad_chat_request_is_told_what_is_wrong(
    client: TestClient, fields: dict[str, object], status: int, reason: str
) -> None:
    got, message = await refusal(client, **fields)
    assert got == status
    assert reason in message


async def test_neutral_values_of_unserved_fields_are_accepted(client: TestClient) -> None:
    await chat(client, tools=[], frequency_penalty=0, top_k=-1, response_format={"type": "text"}, user="someone")


async def test_models_lists_the_one_model(client: TestClient) -> None:
    listing = await (await client.get("/v1/models")).json()
    assert [card["id"] for card in listing["data"]] == ["tiny"]
    assert listing["data"][0]["max_model_len"] == 256


@pytest.mark.parametrize("option", [{"return_tensors": "np"}, {"return_tensors": "pt"}, {"tokenize": False}])
async def test_option_of_the_tokenizer_is_no_variable_of_the_template(client: TestClient, option: object) -> None:
    """With arrays for a prompt the engine died."""
    assert (await refusal(client, chat_template_kwargs=option))[0] == 400
    assert (await chat(client))["object"] == "chat.completion"


def chat_reply(num_choices: int) -> Json:
    choices = [
        {"index": index, "message": {"content": f"text {index}"}, "finish_reason": "stop", "logprobs": None}
        for index in range(num_choices)
    ]
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    return {"id": "chatcmpl-1", "created": 1, "model": "m", "choices": choices, "usage": usage}


@pytest.mark.parametrize("include_usage", [True, False])
def test_events_carry_every_choice_then_done(include_usage: bool) -> None:
    events = list(events_of(chat_reply(2), include_usage=include_usage))
    assert all(event.startswith(b"data: ") and event.endswith(b"\n\n") for event in events)
    assert events[-1] == b"data: [DONE]\n\n"
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    said = [(c["index"], c["delta"]["content"]) for chunk in chunks for c in chunk["choices"] if c["delta"]]
    ended = [(c["index"], c["finish_reason"]) for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert said == [(0, "text 0"), (1, "text 1")]
    assert ended == [(0, "stop"), (1, "stop")]
    assert [chunk["usage"] for chunk in chunks if chunk["usage"]] == (
        [{"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}] if include_usage else []
    )


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
