"""The health endpoint under callers that send nothing, garbage or too much: it answers whoever asks properly."""

import contextlib
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from runtime.health.health import Health
from runtime.health.server import HealthServer
from tests.support.waiting import until


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
