import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from runtime.errors import PeerLostError, StorageError, UserError
from runtime.health.health import Health
from tests.support.waiting import until
from tests.trainer.runs import RUN_ID, FakeOrchestrator, make_batch, make_sample
from tests.trainer.tiny import ALONE
from trainer.batches.orchestrator import OrchestratorLink
from trainer.batches.source import NoBatch
from trainer.config.trainer import OrchestratorLinkConfig
from transport.outbox.progress import PublishedWeights


@dataclass
class Rank:
    """A link with its health, and a stop request that comes after it was looked for `patience` times."""

    health: Health
    patience: int | None = None
    looked: int = field(default=0)

    def stop_requested(self) -> bool:
        self.looked += 1
        return self.patience is not None and self.looked > self.patience

    def link(self, endpoint: str, run_id: str = RUN_ID, lost_timeout_s: float = 5.0) -> OrchestratorLink:
        config = OrchestratorLinkConfig(
            endpoint=endpoint,
            connect_timeout_s=lost_timeout_s,
            peer_timeout_s=0.5,
            lost_timeout_s=lost_timeout_s,
        )
        return OrchestratorLink(
            config,
            run_id,
            ALONE,
            last_committed=0,
            health=self.health,
            stop_requested=self.stop_requested,
        )


@pytest.fixture
def rank() -> Rank:
    return Rank(Health("trainer", 900))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeOrchestrator]:
    with FakeOrchestrator(tmp_path / "outbox", RUN_ID) as running:
        yield running


@pytest.fixture
def gone(tmp_path: Path) -> str:
    """An endpoint that nobody serves any more."""
    with FakeOrchestrator(tmp_path / "gone", RUN_ID) as server:
        return server.endpoint


def test_batches_samples_and_the_end_come_from_the_server(server, rank):
    server.publish(1)
    server.end(1)
    link = rank.link(server.endpoint)
    link.connect()
    manifest = link.manifest(1)
    assert manifest.step == 1
    assert [sample.trajectory_id for sample in link.samples(manifest, [3, 0])] == [
        make_sample(RUN_ID, 1, index).trajectory_id for index in (3, 0)
    ]
    assert link.manifest(2) is NoBatch.END
    link.close("done")


def test_a_batch_that_is_damaged_on_the_disk_ends_the_trainer_with_its_path(server, rank, tmp_path):
    server.publish(1)
    path = tmp_path / "outbox" / "step-00000001.batch"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    link = rank.link(server.endpoint)
    link.connect()
    manifest = link.manifest(1)
    with pytest.raises(StorageError, match=str(path)):
        link.samples(manifest, range(manifest.num_samples))
    link.close("damaged")


def test_reports_reach_the_outbox_in_their_order(server, rank, tmp_path):
    server.publish(1)
    link = rank.link(server.endpoint)
    link.published(PublishedWeights(version=1, location=str(tmp_path / "manifest.json"), digest="digest"))
    assert (server.version, server.progress) == (1, (0, 0))
    link.trained(1)
    assert server.progress == (1, 0)
    link.committed(1)
    assert server.progress == (1, 1)
    link.close("done")


def test_a_stop_request_ends_the_wait_for_a_batch(server, rank):
    rank.patience = 1
    link = rank.link(server.endpoint)
    link.connect()
    assert link.manifest(1) is NoBatch.STOP
    assert rank.health.waits == ""
    link.close("stopped")


def test_health_says_what_is_waited_for_and_waiting_is_no_stall(server, rank):
    seen: list[str] = []

    def look() -> bool:
        seen.append(rank.health.waits)
        return len(seen) > 2

    rank.stop_requested = look
    link = rank.link(server.endpoint)
    link.manifest(1)
    assert all("batch 1 from the orchestrator" in text for text in seen)
    assert rank.health.progress_age_s < 5
    link.close("stopped")


def test_a_stop_request_does_not_wait_for_an_orchestrator_that_is_gone(gone, rank):
    rank.patience = 0
    link = rank.link(gone, lost_timeout_s=60)
    link.committed(1)
    link.close("stopped")


def test_an_orchestrator_that_stays_away_is_a_lost_peer(gone, rank):
    link = rank.link(gone, lost_timeout_s=0.5)
    with pytest.raises(PeerLostError, match="lost the orchestrator while waiting for batch 1"):
        link.manifest(1)
    link.close("failed")


@pytest.mark.parametrize("is_there", [True, False])
def test_closing_ends_a_wait_in_another_thread(server, gone, rank, is_there):
    """A rank whose peers have failed must not wait for the orchestrator before it ends."""
    link = rank.link(server.endpoint if is_there else gone, lost_timeout_s=600)
    ended: list[str] = []

    def wait() -> None:
        try:
            link.manifest(1)
        except PeerLostError as error:
            ended.append(str(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    until(lambda: rank.looked, within_s=60)
    link.close("failed")
    waiting.join(60)
    assert ["was closed meanwhile" in said for said in ended] == [True]


def test_samples_are_waited_for_even_when_a_stop_is_requested(gone, rank):
    """Other ranks are in the same step: leaving it alone would leave them waiting."""
    rank.patience = 0
    link = rank.link(gone, lost_timeout_s=0.5)
    with pytest.raises(PeerLostError, match="samples of batch 1"):
        link.samples(make_batch(RUN_ID, 1).manifest, [0])
    link.close("failed")


def test_a_server_of_another_run_is_the_users_mistake(server, rank):
    link = rank.link(server.endpoint, run_id="another")
    with pytest.raises(UserError, match="run 'another'"):
        link.connect()
    link.close("failed")


def test_a_server_that_comes_back_is_found_again(rank, tmp_path):
    with FakeOrchestrator(tmp_path / "outbox", RUN_ID) as first:
        first.publish(1)
        link = rank.link(first.endpoint)
        assert link.manifest(1).step == 1
    with FakeOrchestrator(tmp_path / "outbox", RUN_ID, first.endpoint) as second:
        second.publish(2)
        assert link.manifest(2).step == 2
        link.trained(2)
        assert second.progress == (2, 0)
        link.close("done")
