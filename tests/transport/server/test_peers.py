import msgspec

from transport.server.peers import PeerTable
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import Hello

HELLO = Hello(seq=1, schema_version=SCHEMA_VERSION, run_id="r", rank=0, world_size=2, last_committed=0)


def hello(rank: int, world_size: int = 2) -> Hello:
    return msgspec.structs.replace(HELLO, rank=rank, world_size=world_size)


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
