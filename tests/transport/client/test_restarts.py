"""Servers that restart or freeze: the same bytes come again, every rank goes on. Kills: tests/faults/exactly_once."""

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.fakes import Served
from tests.support.process import Process
from tests.support.waiting import until
from tests.transport.samples import RUN, make_batch
from transport.client.client import BatchClient
from transport.errors import PeerTimeout
from transport.outbox.outbox import Outbox

Start = Callable[..., Process]


@pytest.mark.integration
def test_frozen_server_is_outlived(tmp_path: Path, start: Start) -> None:
    server = start("tests.transport.server.serve", str(tmp_path), "tcp://127.0.0.1:0", "2", "2")
    server.until(lambda: "\n" in server.output)
    endpoint = server.output.splitlines()[0]
    heard: list[str] = []
    with BatchClient(endpoint, RUN, peer_timeout_s=0.5, lost_timeout_s=20, on_wait=heard.append) as client:
        manifest = client.manifest(1)
        assert manifest is not None
        server.send(signal.SIGSTOP)
        with ThreadPoolExecutor() as pool:
            samples = pool.submit(client.samples, manifest, [0, 1])
            until(lambda: heard)
            server.send(signal.SIGCONT)
            assert len(samples.result(20)) == 2
    assert any("did not" in line for line in heard)


def test_a_server_that_restarts_serves_the_same_bytes(tmp_path: Path) -> None:
    with Served(Outbox(tmp_path, RUN)) as first:
        first.call(first.server.publish(make_batch(1)))
        client = BatchClient(first.endpoint, RUN, peer_timeout_s=5, lost_timeout_s=20)
        before = client.samples(make_batch(1).manifest, range(8))
    with Served(Outbox(tmp_path, RUN), first.endpoint) as second, client:
        started = time.monotonic()
        assert client.samples(make_batch(1).manifest, range(8)) == before
        assert time.monotonic() - started < 4  # the broken connection is seen long before the peer timeout
        client.trained(1)
        assert second.server.last_trained == 1


def test_a_rank_in_a_long_step_is_known_to_the_new_server(tmp_path: Path) -> None:
    first = Served(Outbox(tmp_path, RUN))
    with first:
        endpoint = first.endpoint
        client = BatchClient(endpoint, RUN, heartbeat_s=0.05)
        client.hello()
    with Served(Outbox(tmp_path, RUN), endpoint) as second:
        until(lambda: [peer.rank for peer in second.server.peers()] == [0])
        client.close()


def test_every_rank_goes_on_with_a_server_that_restarts_after_batches_are_retired(tmp_path: Path) -> None:
    with Served(Outbox(tmp_path, RUN)) as first:
        ranks = [BatchClient(first.endpoint, RUN, rank=rank, world_size=2, lost_timeout_s=30) for rank in range(2)]
        for step in (1, 2, 3):
            first.call(first.server.publish(make_batch(step)))
            for client in ranks:
                assert client.manifest(step) is not None
                client.committed(step)
        assert first.server.outbox.progress.last_retired == 2
    with Served(Outbox(tmp_path, RUN), first.endpoint) as second:
        second.call(second.server.publish(make_batch(4)))
        for client in ranks:
            assert len(client.samples(make_batch(4).manifest, [0])) == 1
            client.close()


def test_only_the_first_rank_tells_of_steps_and_checkpoints(tmp_path: Path) -> None:
    with Served(Outbox(tmp_path, RUN)) as served:
        served.call(served.server.publish(make_batch(1)))
        # Patient, so that it does not connect anew: its greeting would tell, too.
        with BatchClient(served.endpoint, RUN, rank=1, world_size=2, peer_timeout_s=60, heartbeat_s=60) as client:
            client.hello()
            client.trained(1)
            client.committed(1)
        assert (served.server.last_trained, served.server.last_committed) == (0, 0)


def test_every_rank_waits_for_a_server_that_is_away_when_a_step_is_trained(tmp_path: Path) -> None:
    """A rank that went on would wait for the first one in a collective, which fails long before."""
    with Served(Outbox(tmp_path, RUN)) as first:
        first.call(first.server.publish(make_batch(1)))
        heard: list[list[str]] = [[], []]
        ranks = [
            BatchClient(first.endpoint, RUN, rank=rank, world_size=2, lost_timeout_s=60, on_wait=heard[rank].append)
            for rank in range(2)
        ]
        for client in ranks:
            client.hello()
    with ThreadPoolExecutor() as pool:
        told = [pool.submit(client.trained, 1) for client in ranks]
        until(lambda: all(heard), within_s=30)
        assert not any(report.done() for report in told)
        with Served(Outbox(tmp_path, RUN), first.endpoint) as second:
            for report in told:
                report.result(60)
            assert second.server.last_trained == 1
            for client in ranks:
                client.close()


def test_a_server_that_never_comes_back_is_a_timeout(tmp_path: Path) -> None:
    with Served(Outbox(tmp_path, RUN)) as served:
        client = BatchClient(served.endpoint, RUN, peer_timeout_s=0.2, lost_timeout_s=0.6)
        client.hello()
    with client, pytest.raises(PeerTimeout, match=r"for 0\.6 s"):
        client.manifest(1)
