"""The batcher: back-pressure, order of batches, and what happens when the disk refuses."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from orchestrator.batches import batcher as batcher_module
from orchestrator.batches.assembler import BatchAssembler
from orchestrator.batches.batcher import Batcher, BatchWriter, encoded_batch
from orchestrator.batches.staleness_policy import WaitPolicy
from orchestrator.errors import InvariantError
from orchestrator.records.ledger import Ledger
from orchestrator.records.rollout_log import RolloutLog
from orchestrator.values.batch import AssembledBatch
from orchestrator.values.group import ScoredGroup
from orchestrator.values.staleness import check_staleness
from runtime.errors import StorageError
from runtime.health.health import Health
from tests.orchestrator.builders import make_group, make_ticket
from tests.support.waiting import until_async
from transport.backoff import Backoff
from transport.errors import OutboxError
from transport.outbox.outbox import Outbox
from transport.server.server import BatchServer
from transport.wire.batch import EncodedBatch, decode_batch
from transport.wire.ledger import CompletedPositions


def scored(seq: int, version: int = 0) -> ScoredGroup:
    return ScoredGroup(make_group([0.0, 1.0], seq, version=version), (-1.0, 1.0), None)


class RefusingOutbox(Outbox):
    """A disk that is full for the first `num_refusals` batches."""

    num_refusals = 0

    def put(self, batch: EncodedBatch) -> None:
        if self.num_refusals:
            self.num_refusals -= 1
            raise OutboxError("No space left on device")
        super().put(batch)


class Bench:
    def __init__(self, folder: Path, server: BatchServer) -> None:
        self.server = server
        self.assembler = BatchAssembler(WaitPolicy(2, 2, 2, max_steps=4), next_step=1, done=CompletedPositions())
        self.ledger = Ledger(folder / "ledger.jsonl", CompletedPositions())
        self.health = Health("orchestrator", 60)
        self.steps: list[int] = []
        writer = BatchWriter(
            "run",
            "order",
            CompletedPositions(),
            folder / "state.json",
            self.ledger,
            None,
            RolloutLog(None),
        )
        self.batcher = Batcher(
            self.assembler,
            server,
            self.ledger,
            writer,
            self.health,
            max_ahead=2,
            max_steps=4,
            on_shipped=self.shipped,
        )

    async def shipped(self, batch: AssembledBatch) -> None:
        self.steps.append(batch.step)

    def add_groups(self, number: int) -> None:
        for _ in range(number):
            ticket = make_ticket(self.assembler.tail, size=2)
            self.assembler.dispatch(ticket)
            self.ledger.dispatched(ticket)
            self.assembler.add_final(scored(ticket.seq, version=ticket.seq))
        self.batcher.notify()

    async def poll(self, condition: Callable[[], bool]) -> None:
        await until_async(condition, 20)


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    outbox = RefusingOutbox(folder / "outbox", "run")
    async with BatchServer("tcp://127.0.0.1:0", outbox) as server, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve())
        yield Bench(folder, server)
        serving.cancel()


async def test_no_more_batches_than_allowed_lie_untrained(tmp_path: Path) -> None:
    async with bench(tmp_path) as b, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(b.batcher.run())
        b.add_groups(4)
        await b.poll(lambda: "trainer to train step 1" in b.health.waits)
        assert b.server.outbox.steps() == [1, 2]
        assert b.steps == [1, 2]
        running.cancel()


async def test_it_ends_with_the_last_step(tmp_path: Path) -> None:
    async with bench(tmp_path) as b, asyncio.timeout(20):
        b.add_groups(2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(b.batcher.run())
            await b.poll(lambda: b.steps == [1, 2])
            b.server.outbox.retire(2)
            b.add_groups(2)
    assert b.steps == [1, 2, 3, 4]


async def test_a_full_disk_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher_module, "STORE_BACKOFF", Backoff(0.001, 1.0))
    async with bench(tmp_path) as b, asyncio.TaskGroup() as tasks:
        assert isinstance(b.server.outbox, RefusingOutbox)
        b.server.outbox.num_refusals = 3
        running = tasks.create_task(b.batcher.run())
        b.add_groups(1)
        await b.poll(lambda: b.steps == [1])
        running.cancel()
    assert b.server.outbox.steps() == [1]


async def test_a_disk_that_stays_full_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher_module, "STORE_BACKOFF", Backoff(0.001, 1.0))
    async with bench(tmp_path) as b:
        assert isinstance(b.server.outbox, RefusingOutbox)
        b.server.outbox.num_refusals = 1000
        b.add_groups(1)
        with pytest.raises(StorageError, match="batch 1 could not be stored in 5 tries"):
            await b.batcher.run()
        assert b.server.outbox.steps() == []


@pytest.mark.parametrize("num_cancels", [1, 3])
async def test_a_batch_that_has_begun_is_finished_when_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cancels: int
) -> None:
    monkeypatch.setattr(batcher_module, "STORE_BACKOFF", Backoff(0.05, 1.0))
    async with bench(tmp_path) as b:
        assert isinstance(b.server.outbox, RefusingOutbox)
        b.server.outbox.num_refusals = 1
        b.add_groups(1)
        running = asyncio.create_task(b.batcher.run())
        await b.poll(lambda: isinstance(b.server.outbox, RefusingOutbox) and b.server.outbox.num_refusals == 0)
        for _ in range(num_cancels):
            running.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert b.server.outbox.steps() == [1]


def test_samples_are_in_dispatch_order_and_carry_their_names() -> None:
    batch = AssembledBatch(
        2,
        (scored(5), ScoredGroup(make_group([1.0, 1.0], 6), (0.0, 0.0), "zero_signal"), scored(7)),
        CompletedPositions(8),
    )
    samples = decode_batch(encoded_batch("run", batch))
    assert [sample.trajectory_id for sample in samples] == ["copy/5/0#0", "copy/5/0#1", "copy/7/0#0", "copy/7/0#1"]
    assert [sample.advantages for sample in samples] == [-1.0, 1.0, -1.0, 1.0]
    assert {(sample.run_id, sample.group_id) for sample in samples} == {("run", "copy/5/0"), ("run", "copy/7/0")}


def test_a_stale_sample_never_ships() -> None:
    check_staleness(AssembledBatch(4, (scored(0, version=1),), CompletedPositions(1)), max_staleness=2)
    with pytest.raises(InvariantError, match="batch 5 holds a sample of staleness 3"):
        check_staleness(AssembledBatch(5, (scored(0, version=1),), CompletedPositions(1)), max_staleness=2)
