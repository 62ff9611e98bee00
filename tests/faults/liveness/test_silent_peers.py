"""Rows 4 and 18: a frozen peer, a half-open connection, a cut or slow one. Seen within 5 s, survived without a loss.

All tests share one live run; each finds it training and leaves it training. In the long form (`make faults`) a peer
falls silent a tenth of `--kills` times, and the trainer stays frozen for a third of `--minutes`.
"""

import signal
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from orchestrator.records.ledger import LEDGER_NAME, read_ledger
from tests.faults.chaos_proxy import Faults
from tests.faults.conftest import Figures, Record
from tests.faults.liveness.run import LiveRun, live_run
from tests.support.process import NOTICE_S, PATIENCE_S, frozen
from transport.wire.ledger import tally

pytestmark = [pytest.mark.integration, pytest.mark.long]

BATCH_SIZE, MAX_STALENESS = 8, 2
BACKLOG = (MAX_STALENESS + 1) * BATCH_SIZE
RSS_GROWTH = 0.1
FROZEN_S = 6.0
A_DAY_S = 86_400.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[LiveRun]:
    folder = tmp_path_factory.mktemp("silent")
    changes = {"batch_size": BATCH_SIZE, "max_staleness": MAX_STALENESS, "stall_timeout_s": A_DAY_S}
    with live_run(folder, model, **changes) as running:
        yield running


@pytest.fixture(autouse=True)
def _whole(run: LiveRun) -> None:
    """Every test begins with two sides that see each other and train."""
    run.advance()
    run.orchestrator.until(lambda: is_whole(run))


@pytest.fixture
def times(kills: int | None) -> int:
    """How often a peer falls silent."""
    return max(1, (kills or 0) // 10)


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


def next_step_s(run: LiveRun) -> float:
    """Seconds until the next step is trained; both sides see each other then."""
    before = run.step()
    waited_s = run.trainer.until(lambda: run.step() > before)
    run.orchestrator.until(lambda: is_whole(run))
    return waited_s


def times_of(noticed_s: Sequence[float], resumed_s: Sequence[float]) -> Figures:
    """How soon a silent peer was noticed, and how soon training went on when it was back."""
    return {
        "times": len(noticed_s),
        "noticed_s_median": round(statistics.median(noticed_s), 2),
        "noticed_s_max": round(max(noticed_s), 2),
        "next_step_s_max": round(max(resumed_s), 2),
    }


def freeze(run: LiveRun, name: str) -> float:
    """Freeze a service until the other one misses it and says so; after so many seconds."""
    target, watcher, misses = {
        "trainer": (run.trainer, run.orchestrator, misses_the_trainer),
        "orchestrator": (run.orchestrator, run.trainer, misses_the_orchestrator),
    }[name]
    before = complaints(run)
    with frozen(target):
        return watcher.until(lambda: misses(run) and complaints(run) > before, within_s=NOTICE_S)


@pytest.mark.parametrize("name", ["trainer", "orchestrator"])
def test_frozen_peer_is_noticed_and_both_go_on(run: LiveRun, name: str, times: int, record: Record) -> None:
    noticed_s, resumed_s = [], []
    for _ in range(times):
        noticed_s.append(freeze(run, name))
        resumed_s.append(next_step_s(run))
    record(f"frozen_{name}", times_of(noticed_s, resumed_s))


def test_nothing_piles_up_while_the_trainer_is_frozen(run: LiveRun, minutes: float | None, record: Record) -> None:
    frozen_s = max(FROZEN_S, 20 * (minutes or 0))
    with frozen(run.trainer):
        run.orchestrator.until(lambda: "policy version" in str(run.orchestrator.health().get("waiting_for")))
        first = run.orchestrator.health()
        rss = run.orchestrator.rss_bytes()
        run.orchestrator.until(
            lambda: run.orchestrator.health().get("progress_age_s", 0) > frozen_s, within_s=frozen_s + PATIENCE_S
        )
        last = run.orchestrator.health()
        assert first["backlog"] == last["backlog"] <= BACKLOG
        assert last["in_flight"] == 0
        growth = run.orchestrator.rss_bytes() / rss - 1
        assert growth <= RSS_GROWTH
    run.advance()
    run.orchestrator.until(lambda: is_whole(run))
    figures = {"minutes": frozen_s / 60, "rss_mb": round(rss / 2**20, 1), "rss_growth_share": round(growth, 4)}
    record("trainer_frozen_long", figures)


def test_half_open_connection_is_noticed_on_both_sides_and_made_anew(run: LiveRun, times: int, record: Record) -> None:
    ours_s, theirs_s, resumed_s = [], [], []
    for _ in range(times):
        connections = run.proxy.num_connections
        run.proxy.faults = Faults(black_hole=True)
        try:
            ours_s.append(run.orchestrator.until(lambda: misses_the_trainer(run), within_s=NOTICE_S))
            left_s = NOTICE_S - ours_s[-1]
            theirs_s.append(ours_s[-1] + run.trainer.until(lambda: misses_the_orchestrator(run), within_s=left_s))
        finally:
            run.proxy.faults = Faults()
        resumed_s.append(next_step_s(run))
        assert run.proxy.num_connections > connections
    record("half_open_seen_by_orchestrator", times_of(ours_s, resumed_s))
    record("half_open_seen_by_trainer", times_of(theirs_s, resumed_s))


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
    assert not ledger.states["in_flight"]
