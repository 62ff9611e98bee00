"""Peers that send garbage, floods or other versions get nothing, harm nobody, and are named in one log line."""

import asyncio
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.support.fakes import Served
from tests.support.waiting import until, until_async
from tests.transport.samples import RUN, make_batch
from transport.client.client import BatchClient
from transport.outbox.outbox import Outbox
from transport.server.peers import PeerTable
from transport.server.router import Reason, Rejections, Router, one_line
from transport.wire.codec import decode_server_message, encode, int32
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import (
    Failure,
    GetManifest,
    GetSamples,
    Hello,
    Limits,
    Ping,
    Refusal,
    Samples,
    ServerMessage,
    Stranger,
    Trained,
    Welcome,
)
from transport.wire.sample import EncodedTensor

HELLO = Hello(seq=1, schema_version=SCHEMA_VERSION, run_id=RUN, rank=0, world_size=1, last_committed=0)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(Outbox(tmp_path, RUN), park_s=0.1) as served:
        served.call(served.server.publish(make_batch(1)))
        yield served


@pytest.fixture
def peer(served: Served) -> Iterator[zmq.Socket[bytes]]:
    """A bare DEALER, as hostile as the test makes it."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = 5000
        socket.connect(served.endpoint)
        yield socket


def ask(peer: zmq.Socket[bytes], message: msgspec.Struct) -> ServerMessage:
    peer.send(encode(message))
    return decode_server_message(peer.recv_multipart()[0])


def assert_serves(served: Served) -> None:
    with BatchClient(served.endpoint, RUN, connect_timeout_s=10, lost_timeout_s=10) as client:
        assert len(client.samples(make_batch(1).manifest, range(8))) == 8


def test_garbage_is_counted_logged_once_and_dropped(
    served: Served, peer: zmq.Socket[bytes], warnings_seen: list[str]
) -> None:
    noise = random.Random(1)
    for _ in range(500):
        peer.send(noise.randbytes(noise.randrange(100)))
        peer.send_multipart([noise.randbytes(3) for _ in range(noise.randrange(2, 5))])
    until(lambda: served.server.rejections().get("garbage") == 1000)
    assert_serves(served)
    assert [line.count("rejected garbage from 127.0.0.1") for line in warnings_seen] == [1]


@pytest.mark.parametrize(
    "message",
    [
        GetSamples(seq=2, step=1, indices=int32([8])),
        GetSamples(seq=2, step=1, indices=int32([-1])),
        GetSamples(seq=2, step=99, indices=int32([0])),
        GetSamples(seq=2, step=1, indices=EncodedTensor("int64", (1,), memoryview(bytes(8)))),
        GetSamples(seq=2, step=1, indices=EncodedTensor("int32", (3,), memoryview(bytes(4)))),
        GetSamples(seq=2, step=1, indices=EncodedTensor("int32", (1, 1), memoryview(bytes(4)))),
        GetSamples(seq=2, step=2**62, indices=int32([0])),
        GetManifest(seq=2, step=-5),
        GetManifest(seq=2, step=2**62),
        Trained(seq=2, step=2**62),
    ],
)
def test_absurd_requests_fail_with_a_reason(served: Served, peer: zmq.Socket[bytes], message: msgspec.Struct) -> None:
    assert isinstance(ask(peer, HELLO), Welcome)
    assert isinstance(ask(peer, message), Failure)
    assert served.server.last_trained == 0


def test_empty_request_for_rows_is_served(served: Served, peer: zmq.Socket[bytes]) -> None:
    ask(peer, HELLO)
    assert isinstance(ask(peer, GetSamples(seq=2, step=1, indices=int32([]))), Samples)


def test_a_stranger_gets_no_batch(served: Served, peer: zmq.Socket[bytes]) -> None:
    for message in (GetManifest(seq=7, step=1), GetSamples(seq=7, step=1, indices=int32([0])), Ping(seq=7)):
        assert ask(peer, message) == Stranger(seq=7)


@pytest.mark.parametrize("changes", [{"rank": -1}, {"rank": 1}, {"world_size": 10**9}, {"last_committed": -1}])
def test_absurd_greetings_are_refused(served: Served, peer: zmq.Socket[bytes], changes: dict[str, int]) -> None:
    assert isinstance(ask(peer, msgspec.structs.replace(HELLO, **changes)), Refusal)
    assert served.server.peers() == ()


def test_future_greeting_with_unknown_fields_is_refused_naming_both(served: Served, peer: zmq.Socket[bytes]) -> None:
    future = msgspec.msgpack.decode(encode(HELLO)) | {"schema_version": SCHEMA_VERSION + 1, "colours": ["new"]}
    peer.send(msgspec.msgpack.encode(future))
    reply = decode_server_message(peer.recv())
    assert isinstance(reply, Refusal)
    assert reply.schema_version == SCHEMA_VERSION
    assert served.server.rejections() == {"schema": 1}


def test_requests_without_reading_the_answers_do_not_fill_memory(served: Served, peer: zmq.Socket[bytes]) -> None:
    """A greedy peer's second request is dropped while the first is served; it cannot pile up replies."""
    ask(peer, HELLO)
    for seq in range(2, 1002):
        peer.send(encode(GetSamples(seq=seq, step=1, indices=int32(list(range(8))))))
    until(lambda: served.server.rejections().get("busy", 0) > 100)
    assert_serves(served)


def test_flood_of_greetings_is_answered_in_turn_and_logged_once(
    served: Served, peer: zmq.Socket[bytes], log_lines: list[str]
) -> None:
    for seq in range(1, 301):
        assert ask(peer, msgspec.structs.replace(HELLO, seq=seq)).seq == seq
    assert len(served.server.peers()) == 1
    assert len([line for line in log_lines if "is here" in line]) == 1


def test_rejections_of_many_peers_stay_bounded(warnings_seen: list[str]) -> None:
    rejections = Rejections(max_peers=10)
    for number in range(100):
        for _ in range(5):
            rejections.add(Reason.GARBAGE, f"10.0.0.{number}", "noise")
    assert rejections.counts() == {"garbage": 500}
    assert len(warnings_seen) == 100
    assert len(rejections._logged) == 10


def test_what_a_peer_wrote_stays_on_one_line(warnings_seen: list[str]) -> None:
    Rejections().add(Reason.RUN, "10.0.0.1", "run 'x\n2026 CRITICAL all is lost\x1b[2J" + "y" * 10_000)
    (line,) = warnings_seen
    assert "\n" not in line
    assert len(line) < 450
    assert one_line("a\r\n\x1b\u2028b") == "a????b"


async def test_connection_that_said_nothing_is_counted_when_it_has_the_descriptor_of_one_that_spoke() -> None:
    """The message of the first connection is looked at when its connection is gone and its descriptor is free."""
    callers = [socket.socket() for _ in range(20)]
    router = Router(None, Limits(), peer_timeout_s=5)
    port = int(router.bind("tcp://127.0.0.1:0").rsplit(":", 1)[1])

    def num_silent() -> int:
        return router.rejections.counts().get(Reason.HANDSHAKE.value, 0)

    async with asyncio.TaskGroup() as tasks:
        guards = tasks.create_task(_guarded(router))
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.connect(f"tcp://127.0.0.1:{port}")
            peer.send(encode(HELLO))
        await until_async(lambda: num_silent() == 1)
        assert await router.receive()
        for caller in callers:
            caller.connect(("127.0.0.1", port))
            caller.close()
        await until_async(lambda: num_silent() == 1 + len(callers))
        guards.cancel()
    router.close()


async def _guarded(router: Router) -> None:
    async with asyncio.TaskGroup() as tasks:
        router.start_guards(tasks)


HELLO_OF_TWO = Hello(seq=1, schema_version=SCHEMA_VERSION, run_id="r", rank=0, world_size=2, last_committed=0)


def hello(rank: int, world_size: int = 2) -> Hello:
    return msgspec.structs.replace(HELLO_OF_TWO, rank=rank, world_size=world_size)


def table(num_ranks: int = 2) -> PeerTable:
    peers = PeerTable(peer_timeout_s=5)
    for rank in reversed(range(num_ranks)):
        peers.welcome(b"connection-%d" % rank, "10.0.0.1", hello(rank, num_ranks), now=100.0)
    return peers


def test_ranks_come_in_order() -> None:
    assert [(peer.rank, peer.alive, peer.last_seen) for peer in table(3)] == [(rank, True, 100.0) for rank in range(3)]


def test_silence_beyond_the_timeout_is_death_and_is_told_once() -> None:
    peers = table()
    first = peers.find(b"connection-0")
    assert first is not None
    first.last_seen = 104.0
    assert peers.newly_silent(now=105.0) == []
    assert [peer.rank for peer in peers.newly_silent(now=106.0)] == [1]
    assert peers.newly_silent(now=107.0) == []
    assert [peer.alive for peer in peers] == [True, False]


def test_a_clock_that_stands_still_kills_nobody() -> None:
    assert table().newly_silent(now=99.0) == []


def test_a_new_connection_replaces_the_old_one_of_its_rank() -> None:
    peers = table()
    peers.welcome(b"again", "10.0.0.2", hello(1), now=200.0)
    assert peers.find(b"connection-1") is None
    assert [peer.address for peer in peers] == ["10.0.0.1", "10.0.0.2"]


def test_another_world_size_replaces_every_old_rank() -> None:
    peers = table(4)
    peers.welcome(b"new", "10.0.0.1", hello(3, world_size=8), now=200.0)
    assert [peer.rank for peer in peers] == [3]


def test_a_forgotten_peer_may_be_forgotten_again() -> None:
    peers = table()
    peers.forget(b"connection-0")
    peers.forget(b"connection-0")
    assert [peer.rank for peer in peers] == [1]


def test_peers_may_leave_while_they_are_visited() -> None:
    peers = table(3)
    for peer in peers:
        peers.forget(peer.identity)
    assert list(peers) == []


def test_goodbyes_are_remembered_of_the_last_connections_only() -> None:
    peers = table(1)
    peers.leave(b"connection-0")
    assert peers.find(b"connection-0") is None
    assert peers.has_left(b"connection-0")
    for number in range(5000):
        peers.leave(b"later-%d" % number)
    assert peers.has_left(b"later-4999")
    assert not peers.has_left(b"connection-0")
