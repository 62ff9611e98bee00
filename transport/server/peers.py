"""`PeerTable`: the trainer ranks a server knows, and when each was last heard.

One connection per rank: a rank that says `Hello` on a new connection leaves its old one, and a trainer that comes back
with another world size leaves all old ones. Time is a parameter (monotonic seconds).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from transport.wire.messages import GetManifest, Hello

_MAX_LEFT = 1024
"""Connections that said goodbye, of which it is remembered."""


@dataclass(slots=True)
class Peer:
    identity: bytes
    rank: int
    world_size: int
    address: str
    last_seen: float
    """Monotonic seconds."""
    alive: bool = True
    is_busy: bool = False
    """A request of this peer is being served."""
    parked: GetManifest | None = None
    """A request that waits for its batch, until `parked_until`."""
    parked_until: float = 0.0

    @property
    def name(self) -> str:
        """How log messages name the peer."""
        return f"trainer rank {self.rank} at {self.address}"


class PeerTable:
    """Peers by connection. `peer_timeout_s` of silence make a peer count as dead until it speaks again."""

    def __init__(self, peer_timeout_s: float) -> None:
        self._timeout_s = peer_timeout_s
        self._peers: dict[bytes, Peer] = {}
        self._left: dict[bytes, None] = {}

    def __iter__(self) -> Iterator[Peer]:
        """In the order of their ranks."""
        return iter(sorted(self._peers.values(), key=lambda peer: peer.rank))

    def find(self, identity: bytes) -> Peer | None:
        """The peer of a connection that said `Hello`."""
        return self._peers.get(identity)

    def welcome(self, identity: bytes, address: str, hello: Hello, now: float) -> Peer:
        """A rank introduced itself on this connection. A greeting that comes again changes nothing."""
        known = self._peers.get(identity)
        if known is not None and (known.rank, known.world_size) == (hello.rank, hello.world_size):
            return known
        for old in self:
            if old.rank == hello.rank or old.world_size != hello.world_size:
                self.forget(old.identity)
        peer = Peer(identity, hello.rank, hello.world_size, address, now)
        self._peers[identity] = peer
        return peer

    def forget(self, identity: bytes) -> None:
        """The connection is gone, or its rank has another."""
        self._peers.pop(identity, None)

    def leave(self, identity: bytes) -> None:
        """The peer said goodbye. It speaks on this connection no more: what still comes by it is a repeat."""
        self.forget(identity)
        self._left[identity] = None
        if len(self._left) > _MAX_LEFT:
            del self._left[next(iter(self._left))]

    def has_left(self, identity: bytes) -> bool:
        return identity in self._left

    def newly_silent(self, now: float) -> list[Peer]:
        """Peers that fell silent since the last call."""
        dead = [peer for peer in self if peer.alive and now - peer.last_seen > self._timeout_s]
        for peer in dead:
            peer.alive = False
        return dead
