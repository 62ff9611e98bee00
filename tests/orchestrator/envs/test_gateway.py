"""Columns of saved rollouts: which, in which order, from both drivers, and what stops the run."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat.tokenizer import Tokenizer
from orchestrator.config.envs import EnvConfig
from orchestrator.engines.protocol import Engine
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.gateway import SESSION_HEADER, Gateway
from orchestrator.envs.protocol import REQUIRED_COLUMNS, read_columns, saved_columns
from orchestrator.envs.session import SamplingPlan, Session
from orchestrator.errors import StateColumnError
from orchestrator.records.rollout_log import RolloutLog, rollout_log_path
from orchestrator.values.group import AssembledBatch, FinalGroup, GroupKey, ScoredGroup, Ticket
from orchestrator.values.rollout import Rollout
from runtime.errors import ExitCode
from tests.chat.replies import check_branch, sampled_tokens
from tests.orchestrator.envs.test_verifiers import DRIVERS, only, request_for, running, saying
from tests.support.waiting import until_async
from transport.wire.generation import GenerateRequest
from transport.wire.ledger import CompletedPositions

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


names = st.sampled_from(["trajectory", "sampling_args", "a", "b", "c"])


@given(st.lists(names))
def test_required_columns_come_first_duplicates_go_and_the_order_stays(extra: list[str]) -> None:
    columns = saved_columns(extra)
    assert columns[:2] == REQUIRED_COLUMNS
    assert len(set(columns)) == len(columns)
    assert set(columns) == set(extra) | set(REQUIRED_COLUMNS)
    asked = [name for name in extra if name not in REQUIRED_COLUMNS]
    assert list(columns[2:]) == sorted(set(asked), key=asked.index)


def test_columns_are_json_in_the_order_of_the_config() -> None:
    state = {"b": [1, None, "x"], "a": {"day": date(2026, 1, 2)}, "unused": object()}
    columns = read_columns("env", ["b", "trajectory", "a", "b"], state)
    assert {name: bytes(value) for name, value in columns.items()} == {
        "b": b'[1,null,"x"]',
        "a": b'{"day":"2026-01-02"}',
    }
    assert list(columns) == ["b", "a"]


def looped() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("value", [object(), {1: object()}, [lambda: 0], looped(), 10**30 * 1j])
def test_what_cannot_be_written_is_an_error_with_the_columns_name(value: object) -> None:
    with pytest.raises(StateColumnError, match=r"env 'race'.*'notes' cannot be saved") as caught:
        read_columns("race", ["notes"], {"notes": value})
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_missing_column_is_an_error_that_says_what_there_is() -> None:
    with pytest.raises(StateColumnError, match=r"env 'race'.*no column 'note' \(it has artifacts, notes\)"):
        read_columns("race", ["note"], {"notes": 1, "artifacts": {}})


@DRIVERS
@pytest.mark.usefixtures("env_modules")
async def test_the_state_is_saved_with_the_rollout(tokenizer: Tokenizer, driver: str, tmp_path: Path) -> None:
    config = EnvConfig(id="edge-notes", driver=driver, state_columns=("seen", "trajectory", "best", "seen"))
    async with running(config, saying(tokenizer, "abc"), tokenizer) as adapter:
        rollout = only(await adapter.run(request_for(adapter)))
    columns = list(saved_row(tmp_path, rollout)["state_columns"].items())
    assert columns == [
        (
            "trajectory",
            [
                {
                    "num_tokens": len(rollout.branches[0].token_ids),
                    "num_sampled_tokens": 4,
                    "versions": [[0, len(rollout.branches[0].token_ids) - 4, len(rollout.branches[0].token_ids)]],
                }
            ],
        ),
        ("sampling_args", {"temperature": 0.9, "max_tokens": 16, "seed": 11}),
        ("seen", ["abc"]),
        ("best", {"text": "abc"}),
    ]


@DRIVERS
@pytest.mark.usefixtures("env_modules")
@pytest.mark.parametrize(("column", "said"), [("sen", "no column 'sen'"), ("handle", "'handle' cannot be saved")])
async def test_a_bad_column_stops_the_run_at_the_first_rollout(
    tokenizer: Tokenizer, driver: str, column: str, said: str
) -> None:
    config = EnvConfig(id="edge-notes", driver=driver, state_columns=(column,))
    async with running(config, saying(tokenizer, "abc"), tokenizer) as adapter:
        with pytest.raises(StateColumnError, match=rf"env 'edge-notes'.*{said}"):
            await adapter.run(request_for(adapter))


def saved_row(folder: Path, rollout: Rollout) -> dict[str, Any]:
    ticket = Ticket(GroupKey(rollout.env_name, rollout.example_id, 0), 0, 1, False, 0)
    RolloutLog(folder).write(
        AssembledBatch(1, (ScoredGroup(FinalGroup(ticket, (rollout,)), (1.0,), None),), CompletedPositions(1))
    )
    row: dict[str, Any] = json.loads(rollout_log_path(folder, 1).read_text())
    return row
