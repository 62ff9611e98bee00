"""Rows that are damaged on the disk: no rank trains them, and every rank is told which file it is."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from tests.support.fakes import Served
from tests.support.waiting import until
from tests.transport.samples import RUN, make_batch
from transport.client.client import BatchClient
from transport.errors import RequestFailed
from transport.outbox.outbox import Outbox, batch_path
from transport.wire.codec import decode_server_message, encode, int32
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import ClientMessage, Failure, GetSamples, Hello, Samples, ServerMessage, Welcome

DAMAGED, SOUND = 7, 6
"""Rows of the batch: the last byte of the file is wrong."""
DEADLINE_S = 30.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return batch_path(tmp_path, 1)


@pytest.fixture
def served(tmp_path: Path, path: Path) -> Iterator[Served]:
    with Served(Outbox(tmp_path, RUN), park_s=0.1) as served:
        served.call(served.server.publish(make_batch(1)), timeout_s=DEADLINE_S)
        damage(path)
        yield served


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def client(served: Served, rank: int = 0, world_size: int = 1) -> BatchClient:
    return BatchClient(
        served.endpoint,
        RUN,
        rank=rank,
        world_size=world_size,
        connect_timeout_s=DEADLINE_S,
        lost_timeout_s=DEADLINE_S,
        peer_timeout_s=DEADLINE_S,
    )


@contextmanager
def connected(served: Served) -> Iterator["zmq.Socket[bytes]"]:
    """A bare connection that was welcomed, and that closes without a goodbye."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = int(1000 * DEADLINE_S)
        socket.connect(served.endpoint)
        hello = Hello(seq=1, schema_version=SCHEMA_VERSION, run_id=RUN, rank=0, world_size=1, last_committed=0)
        assert isinstance(ask(socket, hello), Welcome)
        yield socket


def ask(peer: "zmq.Socket[bytes]", message: ClientMessage) -> ServerMessage:
    peer.send(encode(message))
    return decode_server_message(peer.recv_multipart()[0])


def rows(seq: int, *indices: int) -> GetSamples:
    return GetSamples(seq=seq, step=1, indices=int32(list(indices)))


def assert_names(reply: ServerMessage, path: Path) -> None:
    assert isinstance(reply, Failure), reply
    assert f"{path} is corrupt: row {DAMAGED}" in reply.reason


def test_every_rank_is_told_and_still_gets_the_rows_that_are_sound(served: Served, path: Path) -> None:
    with ExitStack() as stack:
        for link in [stack.enter_context(client(served, rank, 3)) for rank in range(3)]:
            with pytest.raises(RequestFailed, match=f"{path} is corrupt: row {DAMAGED}"):
                link.samples(make_batch(1).manifest, [SOUND, DAMAGED])
            assert len(link.samples(make_batch(1).manifest, [SOUND])) == 1


def test_damage_after_the_first_answer_is_seen_at_the_second(tmp_path: Path, path: Path) -> None:
    with Served(Outbox(tmp_path, RUN), park_s=0.1) as served:
        served.call(served.server.publish(make_batch(1)), timeout_s=DEADLINE_S)
        with connected(served) as peer:
            assert isinstance(ask(peer, rows(2, DAMAGED)), Samples)
            damage(path)
            assert_names(ask(peer, rows(3, DAMAGED)), path)


def test_reply_to_a_rank_that_is_gone_is_counted_and_the_rank_forgotten(served: Served) -> None:
    """ROUTER_MANDATORY: without it libzmq would drop the reply and say nothing."""
    with connected(served) as peer:
        assert len(served.server.peers()) == 1
        identity = next(iter(served.server._peers)).identity
        assert served.call(served.server._router.send(identity, "here", Welcome(seq=1, schema_version=1)))
        peer.recv_multipart()

    def is_gone() -> bool:
        message = Welcome(seq=1, schema_version=1)
        return not served.call(served.server._router.send(identity, "here", message), timeout_s=DEADLINE_S)

    until(is_gone, within_s=DEADLINE_S)
    assert served.server.rejections()["unreachable"] == 1
