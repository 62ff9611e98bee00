"""Messages that come again, at once or long after, change nothing and end no wait.

The server's answers as plain functions: no sockets.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.support.fakes import Served
from tests.support.waiting import until
from tests.transport.samples import RUN, make_batch
from transport.errors import OutboxError
from transport.outbox.outbox import Outbox
from transport.server.request_handler import (
    answer_hello,
    answer_manifest,
    answer_samples,
    has_lost_commit,
    record_report,
)
from transport.wire.codec import decode_server_message, encode, int32
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import (
    Ack,
    Bye,
    ClientMessage,
    Committed,
    EndOfRun,
    Failure,
    GetManifest,
    GetSamples,
    Hello,
    Limits,
    Manifest,
    Refusal,
    Samples,
    ServerMessage,
    Trained,
    WeightsPublished,
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


LIMITS = Limits()

HELLO_OF_TWO = Hello(seq=9, schema_version=SCHEMA_VERSION, run_id=RUN, rank=0, world_size=2, last_committed=0)


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    outbox = Outbox(tmp_path, RUN)
    for step in (1, 2, 3):
        outbox.put(make_batch(step))
    return outbox


def hello(**changes: object) -> Hello:
    return msgspec.structs.replace(HELLO_OF_TWO, **changes)


def test_fresh_trainer_is_welcome(outbox: Outbox) -> None:
    assert answer_hello(outbox, LIMITS, HELLO_OF_TWO) == Welcome(seq=9, schema_version=SCHEMA_VERSION)


@pytest.mark.parametrize("last_committed", [1, 2, 3])
def test_resumed_trainer_is_welcome_and_makes_up_for_its_commit(outbox: Outbox, last_committed: int) -> None:
    greeting = hello(last_committed=last_committed)
    reply = answer_hello(outbox, LIMITS, greeting)
    assert isinstance(reply, Welcome)
    assert has_lost_commit(outbox, greeting)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema_version": 1}, f"schema version 1, this server speaks {SCHEMA_VERSION}"),
        ({"run_id": "b"}, "run 'b', this server runs 'test-run'"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"rank": -1}, "rank -1 of 2"),
        ({"world_size": LIMITS.max_peers + 1}, f"up to {LIMITS.max_peers} ranks"),
        ({"last_committed": 4}, "newest batch of this run is 3"),
        ({"last_committed": -1}, "were committed and retired"),
    ],
)
def test_refusal_names_what_does_not_match(outbox: Outbox, changes: dict[str, object], reason: str) -> None:
    reply = answer_hello(outbox, LIMITS, hello(**changes))
    assert isinstance(reply, Refusal)
    assert reason in reply.reason
    assert reply.schema_version == SCHEMA_VERSION


def test_trainer_may_fall_back_one_checkpoint_and_no_further(outbox: Outbox) -> None:
    outbox.retire(1)
    outbox.retire(2)
    assert isinstance(answer_hello(outbox, LIMITS, hello(last_committed=1)), Welcome)
    assert isinstance(answer_hello(outbox, LIMITS, hello(last_committed=0)), Refusal)
    assert isinstance(answer_manifest(outbox, None, GetManifest(seq=1, step=2)), Manifest)
    assert isinstance(answer_manifest(outbox, None, GetManifest(seq=1, step=1)), Failure)


def test_manifest_is_there_or_to_come_or_after_the_end(outbox: Outbox) -> None:
    def answer(step: int, last_step: int | None = None) -> object:
        return answer_manifest(outbox, last_step, GetManifest(seq=5, step=step))

    assert answer(3) == Manifest(seq=5, manifest=make_batch(3).manifest)
    assert answer(4) is None
    assert isinstance(answer(5), Failure)
    assert isinstance(answer(0), Failure)
    assert answer(4, last_step=3) == EndOfRun(seq=5)
    assert answer(3, last_step=3) == Manifest(seq=5, manifest=make_batch(3).manifest)


def test_rows_come_in_the_order_asked(outbox: Outbox) -> None:
    reply, frames = answer_samples(outbox, LIMITS, GetSamples(seq=5, step=2, indices=int32([7, 0, 7])))
    assert reply == Samples(seq=5)
    expected = make_batch(2).frames
    assert frames == [expected[7], expected[0], expected[7]]


def test_one_row_above_the_reply_limit_is_served_and_two_are_not(outbox: Outbox) -> None:
    limits = Limits(max_reply_bytes=10)
    reply, frames = answer_samples(outbox, limits, GetSamples(seq=5, step=1, indices=int32([0])))
    assert isinstance(reply, Samples)
    assert len(frames) == 1
    reply, frames = answer_samples(outbox, limits, GetSamples(seq=5, step=1, indices=int32([0, 1])))
    assert isinstance(reply, Failure)
    assert not frames


def test_the_same_row_many_times_counts_many_times(outbox: Outbox) -> None:
    limits = Limits(max_reply_bytes=100 * len(make_batch(1).frames[0]))
    reply, _ = answer_samples(outbox, limits, GetSamples(seq=5, step=1, indices=int32([0] * 101)))
    assert isinstance(reply, Failure)


def test_reports_in_any_order_and_number_end_in_the_same_progress(outbox: Outbox) -> None:
    reports = [
        Trained(seq=1, step=1),
        WeightsPublished(seq=2, version=1, location="/w/1", digest="d1"),
        Trained(seq=3, step=2),
        WeightsPublished(seq=4, version=2, location="/w/2", digest="d2"),
        Committed(seq=5, step=2),
    ]
    for report in (*reports, *reversed(reports), *reports):
        record_report(outbox, report)
    progress = outbox.progress
    assert (progress.last_trained, progress.last_committed) == (2, 2)
    assert progress.weights is not None
    assert progress.weights.version == 2


def test_report_of_a_batch_that_was_never_cut_is_an_error(outbox: Outbox) -> None:
    for report in (Trained(seq=1, step=4), Committed(seq=1, step=4)):
        with pytest.raises(OutboxError, match="never cut"):
            record_report(outbox, report)
    assert outbox.progress.last_trained == 0
