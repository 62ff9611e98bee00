"""The link: a silent, half-open or lying server is noticed even without a request, a slow one is borne."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.faults.chaos_proxy import ChaosProxy, Faults
from tests.support.fakes import Served
from tests.support.waiting import until
from tests.transport.samples import RUN, make_batch
from transport.client.client import BatchClient
from transport.errors import CorruptFrame, PeerTimeout, SchemaMismatch
from transport.outbox.outbox import Outbox
from transport.wire.codec import encode
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import (
    Samples,
    Welcome,
)

PEER_TIMEOUT_S, HEARTBEAT_S = 1.0, 0.1


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(Outbox(tmp_path / "outbox", RUN), park_s=0.2, peer_timeout_s=PEER_TIMEOUT_S) as served:
        served.call(served.server.publish(make_batch(1)))
        yield served


@pytest.fixture
def proxy(served: Served) -> Iterator[ChaosProxy]:
    with ChaosProxy(int(served.endpoint.rpartition(":")[2])) as proxy:
        yield proxy


class Listening:
    """A client and what it was told of its connection."""

    def __init__(self, endpoint: str) -> None:
        self.news: list[str] = []
        self.client = BatchClient(
            endpoint,
            RUN,
            peer_timeout_s=PEER_TIMEOUT_S,
            heartbeat_s=HEARTBEAT_S,
            lost_timeout_s=30,
            on_link=self.news.append,
        )


@pytest.fixture
def listening(proxy: ChaosProxy) -> Iterator[Listening]:
    listening = Listening(f"tcp://127.0.0.1:{proxy.port}")
    with listening.client:
        listening.client.hello()
        yield listening


def ranks_alive(served: Served) -> int:
    return sum(peer.alive for peer in served.server.peers())


def test_first_news_is_that_all_is_well(listening: Listening) -> None:
    assert listening.news == [""]


def test_idle_rank_notices_a_half_open_connection_and_makes_a_new_one(
    served: Served, proxy: ChaosProxy, listening: Listening
) -> None:
    proxy.faults = Faults(black_hole=True)
    until(lambda: ranks_alive(served) == 0)
    until(lambda: listening.news[-1] != "")
    assert len(listening.news) >= 2
    proxy.faults = Faults()
    until(lambda: listening.news[-1] == "")
    until(lambda: ranks_alive(served) == 1)


def test_idle_rank_comes_back_by_itself_after_a_cut(served: Served, proxy: ChaosProxy, listening: Listening) -> None:
    before = proxy.num_connections
    proxy.cut()
    until(lambda: proxy.num_connections > before)
    until(lambda: ranks_alive(served) == 1)
    assert listening.client.samples(make_batch(1).manifest, [0])


def test_idle_rank_greets_a_server_that_restarted(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox", RUN)
    with Served(outbox) as first:
        endpoint = first.endpoint
        listening = Listening(endpoint)
        listening.client.hello()
    with listening.client, Served(outbox, endpoint) as second:
        until(lambda: ranks_alive(second) == 1)
        until(lambda: listening.news[-1] == "")


def test_stuck_event_loop_looks_dead_to_the_rank_although_its_connection_stands(
    served: Served, listening: Listening
) -> None:
    release = threading.Event()
    served._loop.call_soon_threadsafe(release.wait, 10)
    try:
        until(lambda: listening.news[-1] != "")
    finally:
        release.set()
    until(lambda: listening.news[-1] == "")


def test_reply_that_takes_longer_than_the_peer_timeout_arrives_in_the_end(
    proxy: ChaosProxy, listening: Listening
) -> None:
    manifest = listening.client.manifest(1)
    assert manifest is not None
    size = int(manifest.columns.num_bytes.numpy()[0])
    proxy.faults = Faults(trickle_bytes_per_s=round(size / (2 * PEER_TIMEOUT_S)))
    started = time.monotonic()
    assert len(listening.client.samples(manifest, [0])) == 1
    assert time.monotonic() - started > PEER_TIMEOUT_S, "the link was not slow: the test shows nothing"


def test_rank_that_waits_long_for_an_answer_does_not_look_dead(
    served: Served, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of the server is slow: heartbeats go on in both directions meanwhile."""
    frames = served.server.outbox.frames
    seen: list[int] = []

    def slow_frames(step: int, rows: list[int]) -> list[memoryview]:
        deadline = time.monotonic() + 3 * PEER_TIMEOUT_S
        while time.monotonic() < deadline:
            seen.append(ranks_alive(served))
            time.sleep(0.05)
        return frames(step, rows)

    monkeypatch.setattr(served.server.outbox, "frames", slow_frames)
    assert listening.client.samples(make_batch(1).manifest, [0])
    assert set(seen) == {1}
    assert listening.news == [""]


def test_wait_for_a_server_that_is_not_there_can_be_ended_soon() -> None:
    class Stop(Exception):
        pass

    def stop(_: str) -> None:
        raise Stop

    with BatchClient("tcp://127.0.0.1:1", RUN, peer_timeout_s=30, heartbeat_s=HEARTBEAT_S, on_wait=stop) as client:
        started = time.monotonic()
        with pytest.raises(Stop):
            client.hello()
    assert time.monotonic() - started < 5


Reply = Callable[[int], list[bytes]]


class FakeServer:
    """Answers each request with the next entry of a script (the last one for ever), for tests of the client."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    def play(self, *script: Reply) -> None:
        self._script = script
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _answer(self) -> None:
        number = 0
        while not self._stop.is_set():
            if self._socket.poll(20):
                identity, head = self._socket.recv_multipart()
                reply = self._script[min(number, len(self._script) - 1)]
                self._socket.send_multipart([identity, *reply(msgspec.msgpack.decode(head)["seq"])])
                number += 1


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def welcome(seq: int) -> list[bytes]:
    return [encode(Welcome(seq=seq, schema_version=SCHEMA_VERSION))]


def test_client_refuses_a_server_of_another_version(fake: FakeServer) -> None:
    fake.play(lambda seq: [encode(Welcome(seq=seq, schema_version=7))])
    client = BatchClient(fake.endpoint, RUN, connect_timeout_s=5)
    with client, pytest.raises(SchemaMismatch, match=f"speaks {SCHEMA_VERSION}, the peer 7"):
        client.hello()


def test_client_names_the_version_of_a_refusal_it_cannot_decode(fake: FakeServer) -> None:
    future = {"kind": "refusal", "seq": 1, "schema_version": 8, "reason": "old", "hint": "upgrade"}
    fake.play(lambda seq: [msgspec.msgpack.encode(future)])
    client = BatchClient(fake.endpoint, RUN, connect_timeout_s=5)
    with client, pytest.raises(SchemaMismatch, match="the peer 8"):
        client.hello()


def test_client_gives_up_on_a_server_that_talks_garbage(fake: FakeServer) -> None:
    fake.play(lambda seq: [b"\xc1garbage"])
    client = BatchClient(fake.endpoint, RUN, connect_timeout_s=0.5, peer_timeout_s=0.2)
    with client, pytest.raises(PeerTimeout, match="not a message of ours"):
        client.hello()


def test_damaged_samples_are_fetched_again_and_given_up_after_a_few_times(fake: FakeServer) -> None:
    batch = make_batch(1)
    damaged = [bytes(len(frame)) for frame in batch.frames]
    fake.play(
        welcome,
        lambda seq: [encode(Samples(seq=seq)), *damaged],
        lambda seq: [encode(Samples(seq=seq)), *batch.frames],
        lambda seq: [encode(Samples(seq=seq)), *damaged],
    )
    with BatchClient(fake.endpoint, RUN, connect_timeout_s=5, heartbeat_s=100) as client:
        assert len(client.samples(batch.manifest, range(8))) == 8
        with pytest.raises(CorruptFrame, match="damaged 3 times"):
            client.samples(batch.manifest, range(8))
