"""Heartbeats of the link: a silent or half-open server is noticed without a request, a slow one is borne."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.chaos_proxy import ChaosProxy, Faults
from tests.support.fakes import Served
from tests.support.waiting import until
from tests.transport.samples import RUN, make_batch
from transport.client.client import BatchClient
from transport.outbox.outbox import Outbox

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
