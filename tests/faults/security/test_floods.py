"""Peers that speak no ZeroMQ, never finish their greeting, or send too much, against a live server process.

Meanwhile an honest trainer must be served. libzmq tells no address of a connection that ends before its first message:
it is counted, and all of them together have one line in the log.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from tests.faults.security.attacked_server import NUM_SAMPLES, RUN, first_batch
from tests.faults.security.hostile_frames import Attacker, Victim, attacked_server
from tests.support.waiting import until
from transport.client.client import BatchClient
from transport.wire.messages import Limits

HTTP = b"GET /v1/models HTTP/1.1\r\nHost: localhost:29600\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n\r\n"
TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200))
ZMTP_SIGNATURE = b"\xff\0\0\0\0\0\0\0\x01\x7f"
ZMTP_GREETING = ZMTP_SIGNATURE + b"\x03\x01NULL".ljust(54, b"\0")
GROWTH_BYTES = 50 << 20


@dataclass(frozen=True)
class Siege:
    """The server, a trainer that it serves, and what it logged."""

    victim: Victim
    honest: BatchClient
    log_file: Path

    @property
    def port(self) -> int:
        return int(self.victim.endpoint.rpartition(":")[2])

    def serves(self) -> bool:
        return len(self.honest.samples(first_batch().manifest, range(NUM_SAMPLES))) == NUM_SAMPLES

    @property
    def num_rejected(self) -> int:
        """What the server has counted, half a second ago."""
        return sum(self.victim.rejections.values())

    @property
    def num_silent(self) -> int:
        """Of these, connections that ended before their first message."""
        return self.victim.rejections.get("handshake", 0)

    def lines_about(self, peer: str) -> list[str]:
        return [line for line in self.log_file.read_text().splitlines() if f" from {peer}:" in line]

    def caller(self) -> socket.socket:
        """A plain TCP connection."""
        return socket.create_connection(("127.0.0.1", self.port), 10)

    @contextmanager
    def dealer(self, address: str) -> "Iterator[zmq.Socket[bytes]]":
        """A ZeroMQ connection from `address`."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger, peer.sndtimeo, peer.rcvtimeo = 0, 10_000, 10_000
            peer.connect(f"tcp://{address}:0;127.0.0.1:{self.port}")
            yield peer


@pytest.fixture(scope="module")
def siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    folder = tmp_path_factory.mktemp("siege")
    with (
        attacked_server(folder) as victim,
        BatchClient(victim.endpoint, RUN, connect_timeout_s=20, lost_timeout_s=30) as client,
    ):
        client.hello()
        yield Siege(victim, client, folder / "server.log")


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has hung up; what it said before is dropped."""
    connection.settimeout(0.05)
    try:
        return connection.recv(4096) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "first_words",
    [
        HTTP,
        HTTP * 50,
        TLS,
        ZMTP_GREETING + b"\x00\x05READY" * 100,
        ZMTP_GREETING + b"\x04\xff" + b"\xff" * 300,
        bytes(range(1, 256)) * 10,
        b"",
    ],
    ids=["http", "http pipelined", "tls", "not ready", "endless command", "bytes", "nothing"],
)
def test_who_does_not_speak_our_protocol_is_counted_when_it_leaves(siege: Siege, first_words: bytes) -> None:
    for _ in range(2):
        before = siege.num_rejected
        with siege.caller() as caller:
            caller.sendall(first_words)
            assert siege.serves()
        until(lambda so_far=before: siege.num_rejected > so_far, within_s=30)
    assert siege.serves()
    assert siege.log_file.read_text().count("rejected handshake") <= 1


def test_unfinished_greetings_are_cut_off_and_keep_nobody_waiting(siege: Siege) -> None:
    before = siege.num_silent
    with ExitStack() as stack:
        callers = [stack.enter_context(siege.caller()) for _ in range(200)]
        for number, caller in enumerate(callers):
            caller.sendall(ZMTP_GREETING[: number % len(ZMTP_GREETING)])
        started = time.monotonic()
        assert siege.serves()
        assert time.monotonic() - started < 3
        waiting = set(callers)

        def all_cut_off() -> bool:
            waiting.difference_update([caller for caller in waiting if is_closed(caller)])
            return not waiting

        until(all_cut_off, within_s=30)
    assert siege.serves()
    until(lambda: siege.num_silent >= before + 200, within_s=30)
    assert siege.log_file.read_text().count("rejected handshake") == 1


def test_message_of_a_hundred_thousand_parts_is_dropped_whole(siege: Siege) -> None:
    before = siege.victim.process.memory_info().rss
    with siege.dealer("127.0.0.42") as peer:
        for _ in range(3):
            peer.send_multipart([b"part"] * 100_000)
            assert siege.serves()
        attack_is_over(siege)
    assert siege.victim.process.memory_info().rss - before < GROWTH_BYTES
    (line,) = siege.lines_about("127.0.0.42")
    assert "a message of 100001 frames" in line


@pytest.mark.parametrize("size", [Limits().max_request_bytes + 5000, 64 << 20])
def test_oversize_frame_ends_the_connection_before_it_is_read(siege: Siege, size: int) -> None:
    before, num_silent = siege.victim.process.memory_info().rss, siege.num_silent
    with siege.dealer("127.0.0.43") as peer:
        monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        peer.send(bytes(size))
        assert monitor.poll(10_000), "the server did not hang up"
        peer.disable_monitor()
        monitor.close()
    assert siege.serves()
    assert siege.victim.process.memory_info().rss - before < GROWTH_BYTES
    until(lambda: siege.num_silent > num_silent, within_s=30)


def test_largest_frame_that_is_read_is_named_and_dropped(siege: Siege) -> None:
    with siege.dealer("127.0.0.45") as peer:
        peer.send(bytes(Limits().max_request_bytes + 1))
        until(lambda: len(siege.lines_about("127.0.0.45")) == 1)
    assert "rejected oversize" in siege.lines_about("127.0.0.45")[0]
    assert siege.serves()


def attack_is_over(siege: Siege) -> None:
    """Return once the server has dealt with everything."""
    attacker = Attacker(siege.victim.endpoint, reads=True)
    attacker.sync()
    attacker.close()


def test_many_connections_that_come_and_go_leave_nothing_behind(siege: Siege) -> None:
    def num_files() -> int:
        return siege.victim.process.num_fds()

    before = num_files()
    for _ in range(300):
        with siege.caller() as caller:
            caller.sendall(HTTP)
    until(lambda: num_files() <= before + 2, within_s=30)
    assert siege.serves()
