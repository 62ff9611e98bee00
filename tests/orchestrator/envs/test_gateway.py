import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest

from chat.tokenizer import Tokenizer
from orchestrator.engines.protocol import Engine
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.gateway import SESSION_HEADER, Gateway
from orchestrator.envs.session import SamplingPlan, Session
from tests.chat.replies import check_branch, sampled_tokens
from tests.support.waiting import until_async
from transport.wire.generation import GenerateRequest

HELLO = [{"role": "user", "content": "hello"}]


def make_session(engine: Engine, tokenizer: Tokenizer, name: str = "g#0", seed: int = 5) -> Session:
    return Session(engine, tokenizer, SamplingPlan(name, seed, temperature=0.7, max_tokens=6))


@asynccontextmanager
async def chatting(gateway: Gateway) -> AsyncIterator[aiohttp.ClientSession]:
    await gateway.start()
    try:
        async with aiohttp.ClientSession() as client:
            yield client
    finally:
        await gateway.close()


async def post(client: aiohttp.ClientSession, gateway: Gateway, session_id: str, body: object) -> tuple[int, dict]:
    headers = {SESSION_HEADER: session_id}
    async with client.post(f"{gateway.url}/chat/completions", json=body, headers=headers) as response:
        return response.status, await response.json()


def scripted(tokenizer: Tokenizer, seen: list[GenerateRequest] | None = None, text: str = "yes") -> ScriptedEngine:
    def script(request: GenerateRequest) -> np.ndarray:
        if seen is not None:
            seen.append(request)
        return np.append(tokenizer.encode(text), min(tokenizer.eos_ids)).astype(np.int32)

    return ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids), script=script)


async def test_chat_completion_has_the_shape_of_openai(tokenizer: Tokenizer) -> None:
    gateway = Gateway("policy")
    session = make_session(scripted(tokenizer), tokenizer)
    async with chatting(gateway) as client:
        gateway.open("s", session)
        status, body = await post(client, gateway, "s", {"model": "x", "messages": HELLO, "temperature": 0.1})
    assert status == 200
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "yes"}
    assert choice["finish_reason"] == "stop"
    prompt_length = len(tokenizer.encode_chat(HELLO))
    assert body["usage"] == {"prompt_tokens": prompt_length, "completion_tokens": 4, "total_tokens": prompt_length + 4}
    assert (body["object"], body["model"]) == ("chat.completion", "policy")


async def test_sampling_is_the_runs_and_turn_k_uses_seed_plus_k(tokenizer: Tokenizer) -> None:
    gateway, seen = Gateway("policy"), []
    async with chatting(gateway) as client:
        gateway.open("s", make_session(scripted(tokenizer, seen), tokenizer))
        await post(client, gateway, "s", {"messages": HELLO, "temperature": 2.0, "seed": 1, "max_tokens": 99})
        await post(client, gateway, "s", {"messages": HELLO, "max_completion_tokens": 3})
    assert [(request.seed, request.temperature, request.max_tokens) for request in seen] == [(5, 0.7, 6), (6, 0.7, 3)]
    assert [request.request_id for request in seen] == ["g#0/0", "g#0/1"]


async def test_two_sessions_do_not_mix(tokenizer: Tokenizer) -> None:
    gateway = Gateway("policy")
    engine = ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids))
    sessions = [make_session(engine, tokenizer, f"g#{index}", seed=100 * index) for index in range(2)]
    async with chatting(gateway) as client:
        for index, session in enumerate(sessions):
            gateway.open(f"s{index}", session)
        await asyncio.gather(*(post(client, gateway, f"s{i % 2}", {"messages": HELLO}) for i in range(6)))
    assert [len(session.trajectory.branches()) for session in sessions] == [3, 3]
    one, two = (sampled_tokens(session.trajectory.branches()) for session in sessions)
    assert one != two


async def test_second_turn_over_http_extends_the_first(tokenizer: Tokenizer) -> None:
    gateway = Gateway("policy")
    session = make_session(ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids)), tokenizer)
    async with chatting(gateway) as client:
        gateway.open("s", session)
        _, first = await post(client, gateway, "s", {"messages": HELLO})
        messages = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "more"}]
        await post(client, gateway, "s", {"messages": messages})
    (branch,) = session.trajectory.branches()
    check_branch(branch)
    assert len(branch.versions) == 2


@pytest.mark.parametrize("session_id", ["", "never-opened", "discarded"])
async def test_unknown_session_is_refused(tokenizer: Tokenizer, session_id: str) -> None:
    gateway = Gateway("policy")
    async with chatting(gateway) as client:
        gateway.open("discarded", make_session(scripted(tokenizer), tokenizer))
        gateway.discard("discarded")
        gateway.discard("discarded")
        status, body = await post(client, gateway, session_id, {"messages": HELLO})
    assert status == 401
    assert SESSION_HEADER in body["error"]["message"]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ([], "not a chat completion request"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": HELLO, "stream": True}, "streaming"),
        ({"messages": HELLO, "n": 2}, "n must be 1"),
        ({"messages": [{"role": "user"}, {"content": 5}]}, "chat template"),
    ],
)
async def test_request_that_cannot_be_served_is_refused_with_the_reason(
    tokenizer: Tokenizer, body: object, complaint: str
) -> None:
    gateway = Gateway("policy")
    session = make_session(scripted(tokenizer), tokenizer)
    async with chatting(gateway) as client:
        gateway.open("s", session)
        status, reply = await post(client, gateway, "s", body)
    assert status == 400
    assert complaint in reply["error"]["message"]
    assert not session.trajectory.messages


async def test_engine_failure_is_a_bad_gateway_and_remembered(tokenizer: Tokenizer) -> None:
    broken = ScriptedEngine(4, 2, script=lambda request: np.array([9], dtype=np.int32))
    session = make_session(broken, tokenizer)
    gateway = Gateway("policy")
    async with chatting(gateway) as client:
        gateway.open("s", session)
        status, _ = await post(client, gateway, "s", {"messages": HELLO})
    assert status == 502
    assert "outside the vocabulary" in str(session.failure)
    assert session.trajectory.branches() == ()


async def test_length_limit_is_reported_and_remembered(tokenizer: Tokenizer) -> None:
    session = make_session(scripted(tokenizer, text="a long answer"), tokenizer)
    completion = await session.complete(HELLO)
    assert (completion.finish_reason, completion.text) == ("length", "a long")
    assert session.is_truncated


async def test_request_in_flight_is_cancelled_when_its_client_goes_away(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids), latency=lambda request, count: 60.0)
    gateway = Gateway("policy")
    async with chatting(gateway) as client:
        gateway.open("s", make_session(engine, tokenizer))
        task = asyncio.create_task(post(client, gateway, "s", {"messages": HELLO}))
        await until_async(lambda: engine.num_running)
        task.cancel()
        await until_async(lambda: not engine.num_running)


async def test_models_are_listed_and_close_is_idempotent(tokenizer: Tokenizer) -> None:
    gateway = Gateway("policy")
    async with chatting(gateway) as client:
        async with client.get(f"{gateway.url}/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["policy"]
        gateway.open("s", make_session(scripted(tokenizer), tokenizer))
        await gateway.close()
        assert not gateway.sessions
