"""Rows 4 and 18: a frozen peer, a half-open connection, a cut or slow one. Seen within 5 s, survived without a loss.

All tests share one live run; each finds it training and leaves it training.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.ledger import LEDGER_NAME, read_ledger
from tests.faults.chaos_proxy import Faults
from tests.faults.liveness.run import LiveRun, live_run
from tests.support.process import NOTICE_S, frozen
from transport.ledger_records import tally

pytestmark = pytest.mark.integration

BATCH_SIZE, MAX_STALENESS = 8, 2
BACKLOG = (MAX_STALENESS + 1) * BATCH_SIZE
RSS_GROWTH = 0.1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[LiveRun]:
    folder = tmp_path_factory.mktemp("silent")
    with live_run(folder, model, batch_size=BATCH_SIZE, max_staleness=MAX_STALENESS) as running:
        yield running


@pytest.fixture(autouse=True)
def _whole(run: LiveRun) -> None:
    """Every test begins with two sides that see each other and train."""
    run.advance()
    run.orchestrator.until(lambda: is_whole(run))


def misses_the_trainer(run: LiveRun) -> bool:
    return run.orchestrator.health().get("trainer_ranks") == 0


def misses_the_orchestrator(run: LiveRun) -> bool:
    return run.trainer.health().get("orchestrator") not in (None, "connected")


def is_whole(run: LiveRun) -> bool:
    trainer, orchestrator = run.trainer.health(), run.orchestrator.health()
    return orchestrator.get("trainer") == "connected" and trainer.get("orchestrator") == "connected"


def complaints(run: LiveRun) -> int:
    """Warnings of either side about the other."""
    ours, theirs = run.orchestrator.output, run.trainer.output
    return ours.count("fell silent") + ours.count("is gone") + theirs.count("lost tcp://")


def test_frozen_trainer_is_noticed_and_nothing_piles_up_until_it_thaws(run: LiveRun) -> None:
    with frozen(run.trainer):
        run.orchestrator.until(lambda: misses_the_trainer(run) and complaints(run), within_s=NOTICE_S)
        run.orchestrator.until(lambda: "policy version" in str(run.orchestrator.health().get("waiting_for")))
        first = run.orchestrator.health()
        rss = run.orchestrator.rss_bytes()
        run.orchestrator.until(lambda: run.orchestrator.health()["progress_age_s"] > 6)
        last = run.orchestrator.health()
        assert first["backlog"] == last["backlog"] <= BACKLOG
        assert last["in_flight"] == 0
        assert run.orchestrator.rss_bytes() <= rss * (1 + RSS_GROWTH)
    run.advance()
    run.orchestrator.until(lambda: is_whole(run))


def test_frozen_orchestrator_is_noticed_by_the_trainer_and_both_go_on(run: LiveRun) -> None:
    with frozen(run.orchestrator):
        run.trainer.until(
            lambda: misses_the_orchestrator(run) and "lost tcp://" in run.trainer.output, within_s=NOTICE_S
        )
    run.advance()
    run.orchestrator.until(lambda: is_whole(run))


def test_half_open_connection_is_noticed_on_both_sides_and_made_anew(run: LiveRun) -> None:
    connections = run.proxy.num_connections
    run.proxy.faults = Faults(black_hole=True)
    try:
        seen = run.orchestrator.until(lambda: misses_the_trainer(run), within_s=NOTICE_S)
        run.trainer.until(lambda: misses_the_orchestrator(run), within_s=NOTICE_S - seen)
    finally:
        run.proxy.faults = Faults()
    run.advance()
    run.orchestrator.until(lambda: is_whole(run))
    assert run.proxy.num_connections > connections


def test_cut_connection_is_made_anew(run: LiveRun) -> None:
    for _ in range(3):
        connections = run.proxy.num_connections
        run.proxy.cut()
        run.trainer.until(lambda before=connections: run.proxy.num_connections > before)
        run.advance(1)
    run.orchestrator.until(lambda: is_whole(run))


def test_slow_link_is_not_taken_for_a_dead_one(run: LiveRun) -> None:
    before = complaints(run)
    run.proxy.faults = Faults(delay_s=0.2)
    try:
        run.advance(2)
    finally:
        run.proxy.faults = Faults()
    assert complaints(run) == before


def test_link_too_slow_for_a_reply_within_the_peer_timeout_still_delivers(run: LiveRun) -> None:
    run.proxy.faults = Faults(trickle_bytes_per_s=1000)
    try:
        run.advance(1)
    finally:
        run.proxy.faults = Faults()
    run.advance()
    run.orchestrator.until(lambda: is_whole(run))


def test_every_step_was_trained_once_and_every_rollout_is_accounted_for(run: LiveRun) -> None:
    for stopped in (run.trainer, run.orchestrator):
        stopped.send(signal.SIGTERM)
        assert stopped.wait() == 0, stopped.output
    assert run.steps() == list(range(1, run.step() + 1))
    ledger = tally(read_ledger(run.orchestrator.run_dir.ledger / LEDGER_NAME))
    assert ledger.balances, ledger.problems
