"""Garbage, giants and strangers at a real inference server: a clear 4xx, never a 5xx, and it serves on."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.inference.contract_server import ServerProcess, server_process
from tests.support.models import make_model, save_model
from transport.wire.codec import encode
from transport.wire.generation import GENERATE_PATH, WEIGHTS_PATH, GenerateRequest
from transport.wire.sample import EncodedTensor

pytestmark = pytest.mark.integration

CHAT_PATH = "/v1/chat/completions"
MAX_BODY_BYTES = 16 << 20
DEEP = 100_000
UNFINISHED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
Answer = tuple[int, dict[str, dict[str, str]]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with server_process(folder, save_model(folder / "model", make_model())) as server:
        assert server.url  # waits until it serves
        yield server


@pytest.fixture(autouse=True)
def still_serves(server: ServerProcess) -> Iterator[None]:
    """After every test: the same process answers a proper request."""
    yield
    assert server.poll() is None
    ids = EncodedTensor.of(np.array([5, 6, 7], dtype=np.int32))
    assert server.request(GENERATE_PATH, encode(GenerateRequest(request_id="r", token_ids=ids, max_tokens=2)))[0] == 200


def connect(server: ServerProcess) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)


def post(server: ServerProcess, path: str, body: bytes, **headers: str) -> Answer:
    with closing(connect(server)) as connection:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def admin(server: ServerProcess) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.token_file.read_text()}"}


@pytest.mark.parametrize("path", [GENERATE_PATH, CHAT_PATH, WEIGHTS_PATH])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1\xff\x00",
        b"null",
        b"[" * DEEP,
        b"[" * DEEP + b"]" * DEEP,
        b'{"messages":' * 1000 + b"1" + b"}" * 1000,
        b"\x91" * DEEP,
        b"\xdd\xff\xff\xff\xff",
        b"\xff\xfe{\x00",
        '{"model": "\ud800"}'.encode("utf-8", "surrogatepass"),
        b'{"messages": [], "messages": [], "n": 1e400}',
    ],
    ids=[
        "empty",
        "bytes",
        "null",
        "open",
        "deep",
        "deep object",
        "deep msgpack",
        "huge",
        "utf16",
        "surrogate",
        "twice",
    ],
)
def test_garbage_is_400_with_a_reason(server: ServerProcess, path: str, body: bytes) -> None:
    status, answer = post(server, path, body, **admin(server))
    assert status == 400, answer
    assert answer["error"]["message"]
    assert len(answer["error"]["message"]) < 1000


def test_giant_body_is_413_and_is_not_kept(server: ServerProcess) -> None:
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    with closing(connect(server)) as connection:
        connection.putrequest("POST", GENERATE_PATH)
        connection.putheader("Content-Length", str(1 << 40))
        connection.endheaders()
        sent = 0
        try:
            while sent < 4 * MAX_BODY_BYTES:
                connection.send(bytes(1 << 20))
                sent += 1 << 20
        except OSError:
            pass  # it hung up, which is as good
        else:
            assert connection.getresponse().status == 413
    assert process.memory_info().rss - before < 4 * MAX_BODY_BYTES


def test_endless_chunks_are_cut_off(server: ServerProcess) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(64):
            yield bytes(1 << 20)

    with closing(connect(server)) as connection:
        try:
            connection.request("POST", CHAT_PATH, chunks(), encode_chunked=True)
        except OSError:
            return
        assert connection.getresponse().status == 413


def test_giant_headers_are_refused(server: ServerProcess) -> None:
    with closing(connect(server)) as connection:
        connection.request("GET", "/health", headers={"X-Much": "x" * 100_000})
        assert connection.getresponse().status == 400


@pytest.mark.parametrize(
    "words",
    [b"\x00" * 5000, b"GET\r\n\r\n", b"POST / HTTP/9.9\r\nContent-Length: -5\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 500],
    ids=["zeros", "no path", "wrong length", "tls"],
)
def test_what_is_not_http_is_hung_up_on(server: ServerProcess, words: bytes) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((str(address.hostname), int(address.port or 0)), 10) as connection:
        connection.sendall(words)
        connection.settimeout(10)
        answer = b""
        while chunk := connection.recv(4096):
            answer += chunk
        assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))


def test_bad_http_is_one_line_in_the_log_and_no_traceback(server: ServerProcess) -> None:
    address = urlsplit(server.url)
    for _ in range(20):
        with socket.create_connection((str(address.hostname), int(address.port or 0)), 10) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nBad Header\r\n\r\n")
            connection.recv(4096)
    log = (server.run_dir.logs / "inference.log").read_text()
    assert log.count("bad HTTP from 127.0.0.1") == 1
    assert "Traceback" not in log


def test_unfinished_requests_keep_nobody_waiting(server: ServerProcess) -> None:
    address = urlsplit(server.url)
    with ExitStack() as stack:
        for _ in range(100):
            caller = socket.create_connection((str(address.hostname), int(address.port or 0)), 10)
            stack.enter_context(caller).sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
            )
        started = time.monotonic()
        assert server.request("/health")[0] == 200
        assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer None",
        "Bearer wrong",
        "Basic {token}",
        "{token}",
        "bearer {token}",
        "Bearer {token}x",
        "Bearer {start}",
        "Bearer " + "x" * 4000,
    ],
)
def test_only_the_whole_token_opens_the_admin_routes(server: ServerProcess, authorization: str | None) -> None:
    token = server.token_file.read_text()
    headers = {} if authorization is None else {"Authorization": authorization.format(token=token, start=token[:-1])}
    status, answer = post(server, WEIGHTS_PATH, b"{}", **headers)
    assert status == 401
    assert token not in json.dumps(answer)


@pytest.mark.parametrize(
    "path", ["//inference/admin/weights", "/inference/admin/../admin/weights", "/inference%2Fadmin/weights"]
)
def test_no_other_spelling_of_a_path_gets_around_the_token(server: ServerProcess, path: str) -> None:
    with closing(connect(server)) as connection:
        connection.request("POST", path)
        assert connection.getresponse().status in (401, 404)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
CHAT_FIELDS = ("messages", "max_tokens", "temperature", "n", "seed", "stop", "top_logprobs", "stop_token_ids", "stream")
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), JSON, max_size=4), max_size=3
)
CHATS = st.fixed_dictionaries({"messages": MESSAGES | JSON, "max_tokens": st.just(1)}) | st.dictionaries(
    st.sampled_from(CHAT_FIELDS), JSON, max_size=6
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chat=CHATS)
def test_no_chat_request_is_an_internal_error(server: ServerProcess, chat: dict[str, object]) -> None:
    status, _ = server.request(CHAT_PATH, msgspec.json.encode(chat))
    assert status in (200, 400), chat


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=st.dictionaries(
        st.sampled_from(GenerateRequest.__struct_fields__), JSON | st.binary(max_size=30), max_size=9
    )
)
def test_no_generate_request_is_an_internal_error(server: ServerProcess, fields: dict[str, object]) -> None:
    ids = EncodedTensor.of(np.array([5], dtype=np.int32))
    sound = {"request_id": "r", "token_ids": ids, "max_tokens": 1}
    try:
        body = msgspec.msgpack.encode(sound | fields)
    except (OverflowError, msgspec.MsgspecError):  # integers that msgpack cannot hold
        return
    status, _ = server.request(GENERATE_PATH, body)
    assert status in (200, 400), fields


def test_server_kept_the_token_out_of_its_log(server: ServerProcess) -> None:
    token = server.token_file.read_text()
    files = [path for path in server.run_dir.path.rglob("*") if path.is_file() and path.parent.name != "secrets"]
    assert any(path.name == "inference.log" for path in files)
    assert [path for path in files if token.encode() in path.read_bytes()] == []
