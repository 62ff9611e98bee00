"""OpenAI's chat completions over the engine."""

import json

import pytest
from aiohttp.test_utils import TestClient
from transformers import PreTrainedModel

from inference.api.chat_reply import Json, events_of
from inference.torch_engine.engine import TorchEngine
from tests.support.models import make_tokenizer, score

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
