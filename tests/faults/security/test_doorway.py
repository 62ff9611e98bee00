"""Connections that end without a greeting are reported by address, once; our own ranks come and go in silence."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from loguru import logger

from transport.doorway import Doorway, Sight, peer_address, without_mistaken
from transport.rejections import Reason, Rejections, printable

CLOSED = 999_999
"""A descriptor that is not open: as if libzmq had closed the connection before we looked."""


@pytest.fixture
def log() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logger.add(lambda line: lines.append(str(line)), level="WARNING", format="{message}")
    yield lines
    logger.remove(handler)


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    """Our end of an open TCP connection; the peer comes from 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with closing(peer), closing(accepted):
            yield accepted


@pytest.fixture
def rejections() -> Rejections:
    return Rejections()


@pytest.fixture
def doorway(rejections: Rejections) -> Iterator[Doorway]:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as server:
        yield Doorway(server, rejections)


def visit(doorway: Doorway, descriptor: int, *events: int) -> None:
    """One connection from its first to its last event."""
    for event in (zmq.EVENT_ACCEPTED, *events, zmq.EVENT_DISCONNECTED):
        address = peer_address(descriptor) if event == zmq.EVENT_ACCEPTED else ""
        doorway.see(Sight(event, 0 if event in events else descriptor, address))


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_failed_handshake_is_named_once(doorway: Doorway, connection: socket.socket, log: list[str]) -> None:
    for _ in range(5):
        visit(doorway, connection.fileno(), zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    assert len(log) == 1
    assert log[0].startswith("rejected handshake from 127.0.0.1: it broke off while greeting")


def test_connection_that_says_nothing_is_named(doorway: Doorway, connection: socket.socket, log: list[str]) -> None:
    visit(doorway, connection.fileno())
    assert len(log) == 1
    assert "left without a word" in log[0]


def test_our_own_ranks_leave_in_silence(
    doorway: Doorway, connection: socket.socket, rejections: Rejections, log: list[str]
) -> None:
    doorway.know("127.0.0.1")
    visit(doorway, connection.fileno())
    assert (rejections.counts(), log) == ({}, [])


def test_stranger_beside_one_of_ours_is_named(doorway: Doorway, connection: socket.socket, log: list[str]) -> None:
    doorway.know("127.0.0.1")
    visit(doorway, connection.fileno(), zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    assert len(log) == 1


def test_whom_the_allow_list_has_named_gets_no_second_line(
    doorway: Doorway, connection: socket.socket, rejections: Rejections, log: list[str]
) -> None:
    rejections.add(Reason.KEY, "127.0.0.1", "not on the list")
    visit(doorway, connection.fileno(), zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    assert len(log) == 1
    assert rejections.counts() == {"key": 1, "handshake": 1}


def test_nameless_stranger_is_reported_when_nobody_else_was(doorway: Doorway, log: list[str]) -> None:
    visit(doorway, CLOSED, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    assert log == []
    doorway._report_nameless()
    assert len(log) == 1
    assert "gone before it could be looked up" in log[0]


def test_nameless_stranger_that_comes_again_gets_one_line(
    doorway: Doorway, connection: socket.socket, log: list[str]
) -> None:
    visit(doorway, CLOSED, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    visit(doorway, connection.fileno(), zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    visit(doorway, CLOSED, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    doorway._report_nameless()
    assert [line.startswith("rejected handshake from 127.0.0.1") for line in log] == [True]


def test_number_that_stands_for_a_file_by_now_costs_no_descriptor(doorway: Doorway, tmp_path: Path) -> None:
    """libzmq closed the connection, and a file of ours got its number before we looked."""
    with (tmp_path / "file").open("w") as file:
        before = num_descriptors()
        for _ in range(50):
            visit(doorway, file.fileno())
        assert num_descriptors() < before + 25  # other threads may open one
        file.write("still open")


def test_number_that_stands_for_the_next_connection_by_now_does_not_lend_its_name() -> None:
    """Both came before we looked: what was found for the first is the second's address."""
    accepted, left, failed = zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    sights = [
        Sight(accepted, 7, "b"),
        Sight(accepted, 8, "c"),
        Sight(failed, 0),
        Sight(left, 7),
        Sight(accepted, 7, "b"),
    ]
    assert without_mistaken(sights) == [Sight(accepted, 7, ""), *sights[1:]]
    assert without_mistaken([]) == []


def test_looking_up_an_address_leaves_the_connection_open(doorway: Doorway, connection: socket.socket) -> None:
    before = num_descriptors()
    for _ in range(50):
        visit(doorway, connection.fileno())
    assert num_descriptors() < before + 25
    connection.sendall(b"still open")


@pytest.fixture
def socket_path() -> Iterator[str]:
    """Short enough for a Unix socket, wherever the tests run."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"{folder}/link"


def test_a_rank_on_a_unix_socket_is_known_by_the_name_that_its_messages_bear(
    doorway: Doorway, socket_path: str, rejections: Rejections
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as rank:
        server.bind(f"ipc://{socket_path}")
        rank.connect(f"ipc://{socket_path}")
        rank.send(b"hello")
        assert server.poll(10_000)
        address = str(server.recv_multipart(copy=False)[0].get("Peer-Address"))
    assert address == f"localhost:{os.getuid()}:{os.getgid()}:{os.getpid()}"
    doorway.know(address)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        listener.bind(socket_path + "2")
        listener.listen()
        caller.connect(socket_path + "2")
        with listener.accept()[0] as accepted:
            visit(doorway, accepted.fileno())
    assert rejections.counts() == {}


def test_addresses_that_are_known_stay_bounded(doorway: Doorway) -> None:
    for number in range(10_000):
        doorway.know(f"10.0.{number // 256}.{number % 256}")
    assert len(doorway._familiar) == 4096


def test_what_a_peer_wrote_stays_on_one_line(rejections: Rejections, log: list[str]) -> None:
    rejections.add(Reason.RUN, "10.0.0.1", "run 'x\n2026 CRITICAL all is lost\x1b[2J" + "y" * 10_000)
    assert len(log) == 1
    assert log[0].count("\n") == 1  # the one that ends it
    assert len(log[0]) < 500
    assert printable("a\r\n\x1b\u2028b") == "a????b"
