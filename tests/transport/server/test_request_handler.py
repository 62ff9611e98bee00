"""Messages that come again, at once or long after, change nothing and end no wait."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.support.fakes import Served
from tests.support.waiting import until
from tests.transport.samples import RUN, make_batch
from transport.outbox.outbox import Outbox
from transport.wire.codec import decode_server_message, encode
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import (
    Ack,
    Bye,
    ClientMessage,
    Committed,
    GetManifest,
    Hello,
    Manifest,
    ServerMessage,
    Trained,
    Welcome,
)

HELLO = Hello(seq=1, schema_version=SCHEMA_VERSION, run_id=RUN, rank=0, world_size=1, last_committed=0)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """Batch 1 is there; requests are parked for longer than a test lasts."""
    with Served(Outbox(tmp_path, RUN), park_s=60.0) as served:
        served.call(served.server.publish(make_batch(1)))
        yield served


@pytest.fixture
def peer(served: Served) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = 5000
        socket.connect(served.endpoint)
        yield socket


def tell(peer: "zmq.Socket[bytes]", *messages: ClientMessage) -> None:
    for message in messages:
        peer.send(encode(message))


def hear(peer: "zmq.Socket[bytes]") -> ServerMessage:
    return decode_server_message(peer.recv_multipart()[0])


def ask(peer: "zmq.Socket[bytes]", message: ClientMessage) -> ServerMessage:
    tell(peer, message)
    return hear(peer)


@pytest.mark.parametrize("old", [HELLO, GetManifest(seq=2, step=1)], ids=["greeting", "request"])
def test_an_old_message_that_comes_again_does_not_end_the_wait_for_a_batch(
    served: Served, peer: "zmq.Socket[bytes]", old: ClientMessage
) -> None:
    assert isinstance(ask(peer, HELLO), Welcome)
    assert isinstance(ask(peer, GetManifest(seq=2, step=1)), Manifest)
    tell(peer, GetManifest(seq=3, step=2), old)
    assert hear(peer).seq == old.seq
    served.call(served.server.publish(make_batch(2)))
    reply = hear(peer)
    assert isinstance(reply, Manifest)
    assert (reply.seq, reply.manifest.step) == (3, 2)


def test_a_wait_that_was_given_up_for_another_question_is_not_answered_later(
    served: Served, peer: "zmq.Socket[bytes]"
) -> None:
    assert isinstance(ask(peer, HELLO), Welcome)
    tell(peer, GetManifest(seq=2, step=2))
    assert ask(peer, GetManifest(seq=3, step=1)).seq == 3
    served.call(served.server.publish(make_batch(2)))
    assert ask(peer, GetManifest(seq=4, step=2)).seq == 4


def test_reports_that_come_again_late_take_no_progress_back(served: Served, peer: "zmq.Socket[bytes]") -> None:
    served.call(served.server.publish(make_batch(2)))
    assert isinstance(ask(peer, HELLO), Welcome)
    for step in (1, 2):
        assert isinstance(ask(peer, Trained(seq=2 * step, step=step)), Ack)
        assert isinstance(ask(peer, Committed(seq=2 * step + 1, step=step)), Ack)
    before = served.server.outbox.progress
    assert (before.last_trained, before.last_committed) == (2, 2)
    assert isinstance(ask(peer, Trained(seq=2, step=1)), Ack)
    assert isinstance(ask(peer, Committed(seq=3, step=1)), Ack)
    assert served.server.outbox.progress == before


def test_an_old_greeting_takes_no_commit_back(served: Served, peer: "zmq.Socket[bytes]") -> None:
    """Neither in the middle nor after the goodbye; there it does not bring the rank back either."""
    assert isinstance(ask(peer, HELLO), Welcome)
    assert isinstance(ask(peer, Committed(seq=2, step=1)), Ack)
    assert isinstance(ask(peer, HELLO), Welcome)
    assert served.server.last_committed == 1
    assert isinstance(ask(peer, Bye(seq=3, reason="done")), Ack)
    tell(peer, HELLO)
    peer.send_multipart([b"something", b"else"])
    until(lambda: served.server.rejections().get("garbage") == 1)  # and so it has seen what came before
    assert served.server.last_committed == 1
    assert not served.server.peers()
