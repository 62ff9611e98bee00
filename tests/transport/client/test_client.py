"""Server and client on real sockets: what a trainer asks, and what it gets."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from tests.support.fakes import Served
from tests.support.waiting import until
from tests.transport.samples import RUN, make_batch
from transport.client.client import BatchClient
from transport.errors import BindError, CorruptFrame, FrameTooLarge, PeerTimeout, Refused, RequestFailed, SecurityError
from transport.outbox.outbox import Outbox
from transport.outbox.progress import PublishedWeights
from transport.wire.codec import decode_rows
from transport.wire.messages import Limits


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "outbox", RUN)


@pytest.fixture
def served(outbox: Outbox) -> Iterator[Served]:
    with Served(outbox, park_s=0.2) as served:
        yield served


def client(served: Served, **options: object) -> contextlib.AbstractContextManager[BatchClient]:
    defaults: dict[str, object] = {"connect_timeout_s": 5, "lost_timeout_s": 5, "heartbeat_s": 0.1}
    return BatchClient(served.endpoint, RUN, **(defaults | options))  # type: ignore[arg-type]


def test_a_batch_travels_whole(served: Served) -> None:
    batch = make_batch(1)
    served.call(served.server.publish(batch))
    with client(served) as link:
        assert link.hello() == 1
        assert link.manifest(1) == batch.manifest
        assert link.samples(batch.manifest, range(8)) == decode_rows(batch.manifest, range(8), batch.frames)


def test_who_closes_while_another_thread_waits_says_goodbye(served: Served) -> None:
    """And loses nothing: the server is there."""
    news: list[str] = []
    with ThreadPoolExecutor() as pool, client(served, peer_timeout_s=60.0, on_link=news.append) as link:
        link.hello()
        waiting = pool.submit(link.manifest, 1)
        until(lambda: any(peer.parked for peer in served.server.peers()))
        link.close("failed")
        with pytest.raises(PeerTimeout, match="was closed meanwhile"):
            waiting.result(timeout=10)
    until(lambda: not served.server.peers())
    assert not any(news)


def test_two_ranks_fetch_disjoint_rows(served: Served) -> None:
    batch = make_batch(1)
    served.call(served.server.publish(batch))

    def fetch(rank: int) -> list[str]:
        with client(served, rank=rank, world_size=2) as link:
            return [sample.trajectory_id for sample in link.samples(batch.manifest, range(rank, 8, 2))]

    with ThreadPoolExecutor() as pool:
        even, odd = pool.map(fetch, range(2))
    everything = [sample.trajectory_id for sample in decode_rows(batch.manifest, range(8), batch.frames)]
    assert even == everything[::2]
    assert odd == everything[1::2]


def test_a_waiting_rank_hears_what_for_and_gets_the_batch_when_it_comes(served: Served) -> None:
    served.server.waiting_for = "rollouts"
    heard: list[str] = []
    is_waiting = threading.Event()

    def on_wait(waiting_for: str) -> None:
        heard.append(waiting_for)
        is_waiting.set()

    with client(served, on_wait=on_wait) as link, ThreadPoolExecutor() as pool:
        manifest = pool.submit(link.manifest, 1)
        assert is_waiting.wait(5)
        served.call(served.server.publish(make_batch(1)))
        assert manifest.result(5) == make_batch(1).manifest
    assert set(heard) == {"rollouts"}


def test_announcement_answers_at_once_and_not_at_the_next_sweep(outbox: Outbox) -> None:
    with Served(outbox, park_s=60) as served, client(served, peer_timeout_s=30) as link, ThreadPoolExecutor() as pool:
        manifest = pool.submit(link.manifest, 1)
        until(lambda: any(peer.parked for peer in served.server.peers()))
        served.call(served.server.publish(make_batch(1)))
        assert manifest.result(2) is not None


def test_end_of_run_is_none(served: Served) -> None:
    served.call(served.server.publish(make_batch(1)))
    served.server.end(1)
    with client(served) as link:
        assert link.manifest(1) is not None
        assert link.manifest(2) is None


def test_end_reaches_a_rank_that_is_waiting_already(served: Served) -> None:
    is_waiting = threading.Event()
    with client(served, on_wait=lambda _: is_waiting.set()) as link, ThreadPoolExecutor() as pool:
        manifest = pool.submit(link.manifest, 1)
        assert is_waiting.wait(5)
        served.server.end(0)
        assert manifest.result(5) is None


def test_reports_become_durable_progress_and_wake_the_orchestrator(served: Served, outbox: Outbox) -> None:
    for step in (1, 2, 3):
        served.call(served.server.publish(make_batch(step)))
    with client(served) as link, ThreadPoolExecutor() as pool:
        waits = [
            pool.submit(served.call, served.server.until(lambda: outbox.num_untrained < 2)),
            pool.submit(served.call, served.server.until(lambda: served.server.last_trained >= 2)),
            pool.submit(served.call, served.server.wait_weights(None)),
            pool.submit(served.call, served.server.until(lambda: served.server.last_committed >= 2)),
        ]
        for _ in range(2):  # repeats change nothing
            link.weights_published(2, Path("/w/2"), "digest")
            link.trained(2)
            link.committed(2)
        for wait in waits:
            wait.result(5)
    weights = PublishedWeights(version=2, location="/w/2", digest="digest")
    assert served.server.weights == weights
    assert (served.server.last_trained, served.server.last_committed) == (2, 2)
    assert Outbox(outbox.directory, RUN).progress == outbox.progress


def test_requests_that_cannot_be_served_say_why(served: Served) -> None:
    served.call(served.server.publish(make_batch(1)))
    with client(served) as link:
        with pytest.raises(RequestFailed, match="never cut"):
            link.trained(5)
        with pytest.raises(RequestFailed, match="its next batch is 2"):
            link.manifest(5)
        assert link.manifest(1) is not None


def test_large_batches_come_in_bounded_replies(outbox: Outbox) -> None:
    batch = make_batch(1, num_samples=20, num_tokens=500)
    limits = Limits(max_reply_bytes=3 * len(batch.frames[0]))
    with Served(outbox, limits=limits) as served, client(served, limits=limits) as link:
        served.call(served.server.publish(batch))
        assert link.samples(batch.manifest, range(20)) == decode_rows(batch.manifest, range(20), batch.frames)
        with client(served) as greedy, pytest.raises(RequestFailed, match="in one reply"):
            greedy.samples(batch.manifest, range(20))


def test_oversize_sample_is_refused_before_it_is_stored(outbox: Outbox) -> None:
    with Served(outbox, limits=Limits(max_frame_bytes=1000)) as served:
        with pytest.raises(FrameTooLarge, match="the limit is 1000"):
            served.call(served.server.publish(make_batch(1, num_tokens=5000)))
        assert outbox.next_step == 1


def test_oversize_request_is_refused_before_it_is_sent(served: Served) -> None:
    served.call(served.server.publish(make_batch(1)))
    with client(served, limits=Limits(max_request_bytes=200)) as link:
        link.hello()
        with pytest.raises(FrameTooLarge, match="the limit is 200"):
            link.samples(make_batch(1).manifest, [0] * 100)


def test_trainer_of_another_run_is_refused_by_name(served: Served) -> None:
    foreign = BatchClient(served.endpoint, "foreign", connect_timeout_s=5)
    with foreign, pytest.raises(Refused, match=f"run 'foreign', this server runs '{RUN}'"):
        foreign.hello()
    assert served.server.rejections() == {"run": 1}


def test_trainer_whose_checkpoint_does_not_fit_is_refused(served: Served, outbox: Outbox) -> None:
    for step in (1, 2, 3, 4):
        served.call(served.server.publish(make_batch(step)))
    with client(served, last_committed=9) as link, pytest.raises(Refused, match="newest batch of this run is 4"):
        link.hello()
    outbox.retire(2)
    outbox.retire(3)
    with client(served, last_committed=1) as link, pytest.raises(Refused, match="batches up to 2 were committed"):
        link.hello()
    with client(served, last_committed=2) as link:
        assert link.hello() == 3


def test_commit_that_was_lost_is_made_up_for_at_hello(served: Served) -> None:
    for step in (1, 2, 3):
        served.call(served.server.publish(make_batch(step)))
    with client(served, last_committed=2) as link:
        assert link.hello() == 3
        assert served.server.last_committed == 2
        assert served.server.last_trained == 2


def test_trainer_that_falls_back_to_the_checkpoint_before_can_do_so_again(served: Served) -> None:
    """3 was committed, but cannot be read back; so it is with 4, which comes after the fall."""
    for step in (1, 2, 3, 4):
        served.call(served.server.publish(make_batch(step)))
    with client(served, last_committed=0) as link:
        link.committed(2)
        link.committed(3)
    with client(served, rank=1, world_size=2, last_committed=2) as second_rank:
        second_rank.hello()
        assert served.server.last_committed == 3, "the first rank speaks for all"
    for _ in range(2):
        with client(served, last_committed=2) as link:
            assert link.hello() == 3
            assert served.server.last_committed == 2
            link.committed(4)


def test_a_rank_in_a_long_step_stays_alive_by_heartbeats(outbox: Outbox) -> None:
    with Served(outbox, peer_timeout_s=0.5) as served, client(served, heartbeat_s=0.05) as link:
        link.hello()
        deadline = time.monotonic() + 1.2
        until(lambda: time.monotonic() > deadline)
        assert served.server.peers()[0].alive


def test_a_frozen_rank_is_noticed_and_welcomed_back(outbox: Outbox) -> None:
    with Served(outbox, peer_timeout_s=0.3, park_s=0.1) as served, client(served, heartbeat_s=100) as link:
        link.hello()
        until(lambda: not served.server.peers()[0].alive, within_s=5)
        served.call(served.server.publish(make_batch(1)))
        link.manifest(1)
        assert served.server.peers()[0].alive


def test_a_rank_that_leaves_is_forgotten(served: Served) -> None:
    with client(served) as link:
        link.hello()
        assert [peer.rank for peer in served.server.peers()] == [0]
    until(lambda: not served.server.peers(), within_s=5)


def test_a_trainer_with_another_world_size_replaces_the_old_ranks(served: Served) -> None:
    with client(served, rank=0, world_size=2) as first, client(served, rank=1, world_size=2) as second:
        first.hello()
        second.hello()
        assert [peer.rank for peer in served.server.peers()] == [0, 1]
        with client(served, rank=0, world_size=1) as new:
            new.hello()
            assert len(served.server.peers()) == 1


def test_absent_server_is_a_timeout_within_the_deadline() -> None:
    heard: list[str] = []
    absent = BatchClient("tcp://127.0.0.1:1", RUN, connect_timeout_s=0.5, peer_timeout_s=0.2, on_wait=heard.append)
    started = time.monotonic()
    with absent, pytest.raises(PeerTimeout, match=r"tcp://127\.0\.0\.1:1 for 0\.5 s"):
        absent.hello()
    assert time.monotonic() - started < 2
    assert heard


def test_taken_port_is_one_clear_error(served: Served, outbox: Outbox) -> None:
    with pytest.raises(BindError, match=served.endpoint), Served(outbox, served.endpoint):
        pass


def test_binding_beyond_loopback_needs_keys_or_an_explicit_word(outbox: Outbox) -> None:
    with pytest.raises(SecurityError, match="insecure = true"), Served(outbox, "tcp://0.0.0.0:0"):
        pass
    with Served(outbox, "tcp://0.0.0.0:0", insecure=True) as served:
        assert served.endpoint.startswith("tcp://0.0.0.0:")


def test_rows_damaged_on_the_disk_fail_with_the_path(served: Served, outbox: Outbox) -> None:
    served.call(served.server.publish(make_batch(1)))
    path = outbox.directory / "step-00000001.batch"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with client(served) as link:
        with pytest.raises(RequestFailed, match=str(path)):
            link.samples(make_batch(1).manifest, [7])
        assert len(link.samples(make_batch(1).manifest, [6])) == 1


def test_manifest_that_was_changed_on_the_way_is_not_used(outbox: Outbox) -> None:
    outbox.put(make_batch(1))
    held = outbox._files[1]
    held.manifest = msgspec.structs.replace(held.manifest, digest="0" * 32)
    with Served(outbox) as served, client(served) as link, pytest.raises(CorruptFrame, match="digest"):
        link.manifest(1)
