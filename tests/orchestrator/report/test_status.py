"""What `/health` says about backlog, trainer and engines; a frozen engine is seen within five seconds."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from orchestrator.batches.assembler import BatchAssembler
from orchestrator.config.engines import EnginesConfig
from orchestrator.engines.http_engine import HttpEngine
from orchestrator.report.status import EngineWatch, StatusReporter, pipeline_facts, rejection_facts, trainer_facts
from runtime.health.health import Health
from tests.faults.chaos_proxy import ChaosProxy, Faults
from tests.orchestrator.engine_server import TOKEN, EngineServer
from tests.support.waiting import until_async
from transport.outbox.outbox import Outbox
from transport.outbox.progress import PublishedWeights
from transport.server.peers import Peer
from transport.server.server import BatchServer
from transport.wire.ledger import CompletedPositions

NOW = 100.0


def peer(rank: int, silent_s: float = 0.1, *, alive: bool = True) -> Peer:
    return Peer(b"%d" % rank, rank, world_size=2, address="127.0.0.1", last_seen=NOW - silent_s, alive=alive)


@pytest.mark.parametrize(
    ("in_flight", "pending", "num_untrained", "queued", "backlog"),
    [(0, 0, 0, 0, 0), (5, 8, 0, 3, 8), (8, 8, 2, 16, 24), (0, 0, 3, 24, 24)],
)
def test_backlog_is_what_runs_waits_and_lies_untrained(
    in_flight: int, pending: int, num_untrained: int, queued: int, backlog: int
) -> None:
    facts = pipeline_facts(in_flight, pending, num_untrained, batch_size=8)
    assert facts == {
        "in_flight": in_flight,
        "queued": queued,
        "backlog": backlog,
        "untrained_batches": num_untrained,
    }


def test_trainer_that_is_there() -> None:
    facts = trainer_facts([peer(0), peer(1)], NOW)
    assert facts == {"trainer": "connected", "trainer_ranks": 2, "silent_ranks": 0}


def test_silent_rank_is_named_with_its_silence() -> None:
    facts = trainer_facts([peer(0), peer(1, 4.4, alive=False)], NOW)
    assert facts == {"trainer": "rank 1 has been silent for 4 s", "trainer_ranks": 1, "silent_ranks": 1}


def test_what_was_turned_away_is_counted_by_reason() -> None:
    assert rejection_facts({"garbage": 3, "key": 1}) == {"rejected_garbage": 3, "rejected_key": 1}
    assert rejection_facts({}) == {}


def test_no_trainer() -> None:
    assert trainer_facts([], NOW) == {"trainer": "no trainer is connected", "trainer_ranks": 0, "silent_ranks": 0}


async def test_announced_version_counts_as_trained_before_the_report_comes(tmp_path: Path) -> None:
    """Admission may use the version at once: a trainer that froze between the two must not look like a backlog."""
    health = Health("orchestrator", stall_timeout_s=60)
    outbox = Outbox(tmp_path, "run")
    outbox.mark_weights(PublishedWeights(version=2, location="weights/v2", digest="x"))
    async with BatchServer("tcp://127.0.0.1:0", outbox) as server:
        StatusReporter(
            server, BatchAssembler(8, 5, CompletedPositions()), health, in_flight=lambda: 0, batch_size=8
        ).report()
    assert server.last_trained == 0
    assert health.report()["untrained_batches"] == 2


async def test_reporter_shows_facts_and_tells_ranks_what_this_side_waits_for(tmp_path: Path) -> None:
    health = Health("orchestrator", stall_timeout_s=60)
    async with BatchServer("tcp://127.0.0.1:0", Outbox(tmp_path, "run")) as server:
        reporter = StatusReporter(
            server, BatchAssembler(8, 3, CompletedPositions()), health, in_flight=lambda: 4, batch_size=8
        )
        health.waiting_for("groups for batch 3", loop="batcher")
        reporting = asyncio.create_task(reporter.run())
        await asyncio.sleep(0)  # the first report comes at once
        reporting.cancel()
        assert server.waiting_for == "batcher: groups for batch 3"
    report = health.report()
    assert report["untrained_batches"] == 2
    assert report["in_flight"] == 4
    assert report["trainer"] == "no trainer is connected"


NOTICE_S = 5.0


@pytest.fixture
async def server() -> AsyncIterator[EngineServer]:
    server = EngineServer()
    await server.open()
    yield server
    await server.close()


@pytest.fixture
def proxy(server: EngineServer) -> Iterator[ChaosProxy]:
    with ChaosProxy(int(server.url.rsplit(":", 1)[1])) as proxy:
        yield proxy


@pytest.fixture
async def health(proxy: ChaosProxy) -> AsyncIterator[Health]:
    """Of a process that watches an engine behind the proxy."""
    health = Health("orchestrator", stall_timeout_s=60)
    engine = HttpEngine(EnginesConfig(urls=(f"http://127.0.0.1:{proxy.port}",)), TOKEN)
    await engine.start()
    watching = asyncio.create_task(EngineWatch(engine, health).run())
    await until_async(lambda: health.report().get("engines") == "connected", 5.0)
    yield health
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await engine.close()


def is_missed(health: Health) -> bool:
    return "did not answer" in str(health.report()["engines"])


async def test_frozen_engine_is_seen_and_seen_again(health: Health, proxy: ChaosProxy) -> None:
    proxy.faults = Faults(black_hole=True)
    await until_async(lambda: is_missed(health), NOTICE_S)
    assert f"engines: an answer of the engines (http://127.0.0.1:{proxy.port}/health did not answer" in health.waits
    proxy.faults = Faults()
    await until_async(lambda: health.report()["engines"] == "connected", 10.0)
    assert health.waits == ""


async def test_dead_engine_is_seen(health: Health, proxy: ChaosProxy, server: EngineServer) -> None:
    await server.close()
    proxy.cut()
    await until_async(lambda: is_missed(health), NOTICE_S)
    await server.open()
    await until_async(lambda: health.report()["engines"] == "connected", 10.0)


async def test_engine_out_of_service_is_shown_with_the_reason() -> None:
    health = Health("orchestrator", stall_timeout_s=60)
    engine = HttpEngine(EnginesConfig(), TOKEN)
    engine.availability.lost("http://engine is out of memory")
    watching = asyncio.create_task(EngineWatch(engine, health).run())
    await asyncio.sleep(0)
    await until_async(lambda: health.waits == "engines: an answer of the engines (http://engine is out of memory)", 5.0)
    watching.cancel()
