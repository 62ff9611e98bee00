"""Garbage and strangers at the token gateway: a clear 4xx, and the rollouts go on.

The health endpoint under callers that send nothing, garbage or too much: it answers whoever asks properly.
"""

import asyncio
import contextlib
import io
import json
import logging
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing

import aiohttp
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chat.tokenizer import Tokenizer
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.gateway import MAX_BODY_BYTES, SESSION_HEADER, Gateway
from orchestrator.envs.session import SamplingPlan, Session
from runtime.health.health import Health
from runtime.health.server import HealthServer
from tests.chat.model_folders import CHATML, character_tokenizer, write_folder
from tests.support.waiting import until

HELLO = {"messages": [{"role": "user", "content": "hello"}]}

DEEP = 100_000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("character"), character_tokenizer(), CHATML))


@pytest.fixture
async def gateway(tokenizer: Tokenizer) -> AsyncIterator[Gateway]:
    eos = min(tokenizer.eos_ids)
    reply = np.append(tokenizer.encode("yes"), eos).astype(np.int32)
    engine = ScriptedEngine(tokenizer.vocab_size, eos, script=lambda request: reply)
    gateway = Gateway("policy")
    await gateway.start()
    gateway.open("open-session", Session(engine, tokenizer, SamplingPlan("g#0", 1, temperature=1.0, max_tokens=6)))
    yield gateway
    await gateway.close()


async def post(gateway: Gateway, body: bytes, session: str | None = "open-session") -> tuple[int, str]:
    headers = {} if session is None else {SESSION_HEADER: session}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{gateway.url}/chat/completions", data=io.BytesIO(body), headers=headers) as response,
    ):
        return response.status, await response.text()


async def serves(gateway: Gateway) -> bool:
    return (await post(gateway, msgspec.json.encode(HELLO)))[0] == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff\xfe", b"null", b"[" * DEEP, b'{"messages":' * DEEP, b'{"messages": []}', b'{"messages": [1]}'],
    ids=["empty", "bytes", "null", "deep", "deep object", "no messages", "mistyped"],
)
async def test_garbage_is_400_with_a_reason(gateway: Gateway, body: bytes) -> None:
    status, text = await post(gateway, body)
    assert status == 400
    assert msgspec.json.decode(text)["error"]["message"]
    assert await serves(gateway)


@pytest.mark.parametrize("session", [None, "", "guess", "open-sessio", "x" * 5000])
async def test_without_the_id_of_an_open_rollout_there_is_no_completion(gateway: Gateway, session: str | None) -> None:
    status, text = await post(gateway, msgspec.json.encode(HELLO), session)
    assert status == 401
    assert "open-session" not in text


async def test_closed_rollout_is_a_stranger(gateway: Gateway) -> None:
    gateway.discard("open-session")
    assert (await post(gateway, msgspec.json.encode(HELLO)))[0] == 401


async def test_giant_body_is_413(gateway: Gateway) -> None:
    status, _ = await post(gateway, bytes(MAX_BODY_BYTES + 1))
    assert status == 413
    assert await serves(gateway)


async def test_stranger_is_refused_before_its_body_is_decoded(gateway: Gateway) -> None:
    assert (await post(gateway, b"[" * DEEP, session="guess"))[0] == 401


async def test_gateway_is_reachable_from_this_machine_only(gateway: Gateway) -> None:
    assert gateway.url.startswith("http://127.0.0.1:")


async def test_bad_http_is_one_line_and_no_traceback(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    host, _, port = gateway.url.removeprefix("http://").removesuffix("/v1").partition(":")
    with caplog.at_level(logging.DEBUG):
        for _ in range(5):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\nBad Header\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.0 400")
            writer.close()
            await writer.wait_closed()
    bad = [record for record in caplog.records if "bad HTTP from 127.0.0.1" in record.getMessage()]
    assert len(bad) == 1
    assert all(record.exc_info is None for record in caplog.records)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)

MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content", "name"]), VALUES, max_size=3), max_size=3)

CHATS = st.fixed_dictionaries(
    {"messages": MESSAGES}, optional={"max_tokens": VALUES, "n": VALUES, "stream": VALUES, "tools": VALUES}
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chat=CHATS)
async def test_no_chat_request_is_an_internal_error(gateway: Gateway, chat: dict[str, object]) -> None:
    status, text = await post(gateway, msgspec.json.encode(chat))
    assert status in (200, 400), (chat, text)


@pytest.fixture
def server() -> Iterator[HealthServer]:
    health = Health("orchestrator", stall_timeout_s=60)
    health.ready()
    with closing(HealthServer(health, host="127.0.0.1", port=0)) as server:
        yield server


def status(server: HealthServer) -> str:
    with urllib.request.urlopen(server.url, timeout=5) as response:
        return str(json.loads(response.read())["status"])


def connect(server: HealthServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 5)


def test_callers_that_never_finish_shut_nobody_out_and_are_bounded(server: HealthServer) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        for number in range(300):
            caller = stack.enter_context(connect(server))
            caller.sendall(b"GET /health HT"[: number % 14])
            if number % 50 == 0:
                assert status(server) == "ok"
        assert status(server) == "ok"
        until(lambda: threading.active_count() <= before + 65)
    until(lambda: threading.active_count() <= before)


@pytest.mark.parametrize(
    "words",
    [
        b"\x00" * 1000,
        b"GET " + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"POST /health HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        b"DELETE / HTTP/1.1\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
    ],
    ids=["zeros", "long path", "many headers", "post", "delete", "traversal", "tls"],
)
def test_garbage_gets_an_error_and_leaves_no_trace(
    server: HealthServer, words: bytes, warnings_seen: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with connect(server) as caller:
        caller.sendall(words)
        with contextlib.suppress(OSError):  # it may have hung up by now, without having read everything
            caller.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            assert b" 200 " not in caller.recv(4096).split(b"\r\n")[0]
    assert status(server) == "ok"
    assert warnings_seen == []
    assert "Traceback" not in capfd.readouterr().err


def test_caller_that_hangs_up_leaves_no_traceback(
    server: HealthServer, warnings_seen: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(20):
        with connect(server) as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # close with a reset
            caller.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert status(server) == "ok"
    assert warnings_seen == []
    assert "Traceback" not in capfd.readouterr().err


def test_open_endpoint_says_so_once(warnings_seen: list[str]) -> None:
    with closing(HealthServer(Health("trainer", 60), host="0.0.0.0", port=0)) as server:
        assert server.url.startswith("http://127.0.0.1:")
    assert [line.strip() for line in warnings_seen] == [
        f"/health and /metrics on 0.0.0.0:{server.port} can be read from other machines"
    ]
