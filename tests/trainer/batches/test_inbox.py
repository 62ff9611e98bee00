from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from runtime.health.health import Health
from tests.trainer.runs import RUN_ID, FakeShutdown, make_batch
from tests.trainer.tiny import ALONE
from trainer.batches.inbox import Inbox, Reporter
from trainer.batches.source import NoBatch
from trainer.errors import RankMismatch
from trainer.ranks import Ranks
from transport.outbox.progress import PublishedWeights
from transport.wire.batch import decode_rows
from transport.wire.manifest import BatchManifest
from transport.wire.sample import TrainingSample


@dataclass
class StoredBatches:
    """A source of `num_batches` batches that remembers what it was told."""

    num_batches: int
    told: list[str] = field(default_factory=list)

    def manifest(self, step: int) -> BatchManifest | NoBatch:
        return make_batch(RUN_ID, step).manifest if step <= self.num_batches else NoBatch.END

    def samples(self, manifest: BatchManifest, rows: Sequence[int]) -> Sequence[TrainingSample]:
        batch = make_batch(RUN_ID, manifest.step)
        return decode_rows(batch.manifest, rows, [batch.frames[row] for row in rows])

    def published(self, weights: PublishedWeights) -> None:
        self.told.append(f"published {weights.version}")

    def trained(self, step: int) -> None:
        self.told.append(f"trained {step}")

    def committed(self, step: int) -> None:
        self.told.append(f"committed {step}")

    def close(self, reason: str) -> None:
        self.told.append(reason)


@dataclass(frozen=True)
class TwoRanks(Ranks):
    """This rank, and one that says `other`; an empty `other` repeats what this rank says."""

    other: bytes = b""

    def gather(self, data: bytes) -> list[bytes]:
        return [data, self.other or data]


def inbox(source: StoredBatches, ranks: Ranks = ALONE, max_steps: int | None = None, stop: bool = False) -> Inbox:
    return Inbox(source, ranks, max_steps=max_steps, stop=FakeShutdown(lambda: stop), health=Health("trainer", 900))


def test_batches_come_in_order_from_the_step_after_the_checkpoint_to_the_end():
    box = inbox(StoredBatches(4))
    assert [batch.step for batch in box.batches(after=2)] == [3, 4]
    assert box.ended


def test_the_run_ends_at_max_steps_without_asking_for_more():
    box = inbox(StoredBatches(4), max_steps=3)
    assert [batch.step for batch in box.batches(after=0)] == [1, 2, 3]
    assert box.ended


def test_a_stop_request_ends_before_the_next_batch_and_is_not_the_end_of_the_run():
    box = inbox(StoredBatches(4), stop=True)
    assert list(box.batches(after=0)) == []
    assert not box.ended


def test_a_stop_request_of_another_rank_stops_this_one_too():
    box = inbox(StoredBatches(4), TwoRanks(0, 2, torch.device("cpu"), other=b"stop"))
    assert list(box.batches(after=0)) == []
    assert not box.ended


@pytest.mark.parametrize("other", [b"end", b"another digest"])
def test_ranks_that_hold_different_batches_do_not_train(other):
    box = inbox(StoredBatches(4), TwoRanks(0, 2, torch.device("cpu"), other=other))
    with pytest.raises(RankMismatch, match=r"batch 1: rank 0: .*rank 1: "):
        list(box.batches(after=0))


def test_a_rank_fetches_only_the_rows_it_asks_for():
    box = inbox(StoredBatches(1))
    (batch,) = box.batches(after=0)
    samples = box.fetch(batch, [5, 2])
    assert {row: sample.trajectory_id[-2:] for row, sample in samples.items()} == {5: "#5", 2: "#2"}


@pytest.mark.parametrize(
    ("rank", "told"),
    [(0, ["published 3", "trained 3", "committed 3", "bye"]), (1, ["trained 3", "committed 3", "bye"])],
)
def test_the_first_rank_publishes_and_every_link_knows_what_is_trained_and_committed(rank, told, tmp_path):
    source = StoredBatches(1)
    ranks = TwoRanks(rank, 2, torch.device("cpu"))
    reporter = Reporter(source, ranks, stop=FakeShutdown(), health=Health("trainer", 900))
    reporter.published(PublishedWeights(version=3, location="v3", digest="digest"))
    reporter.trained(3)
    reporter.committed(3)
    inbox(source, ranks).close("bye")
    assert source.told == told
