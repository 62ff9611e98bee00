"""Row 5: a trainer that is slower than generation. Work waits at the source; nothing piles up anywhere."""

import re
from pathlib import Path

import pytest

from tests.faults.liveness.run import RUN, toy_config, toy_orchestrator
from tests.support.metrics import read_metrics
from tests.support.process import service

pytestmark = pytest.mark.integration

BATCH_SIZE, MAX_STALENESS, STEPS = 8, 2, 12
BACKLOG = (MAX_STALENESS + 1) * BATCH_SIZE


def gauge(page: str, name: str) -> float:
    found = re.search(rf"^tandem_orchestrator_now_{name} (\S+)$", page, re.MULTILINE)
    assert found, page
    return float(found[1])


def test_backlog_stays_within_the_staleness_budget_and_admission_pauses(tmp_path: Path) -> None:
    config = toy_config(tmp_path, batch_size=BATCH_SIZE, max_staleness=MAX_STALENESS, max_steps=STEPS)
    slow = ("tests.faults.liveness.light_trainer", config.server.endpoint, RUN, "0.4")
    seen: list[dict[str, float]] = []
    waits: set[str] = set()
    with (
        toy_orchestrator(config, latency_s=0.0) as orchestrator,
        service("light", config.run.path, *slow) as trainer,
    ):
        orchestrator.until(lambda: "2" in trainer.output.split())
        rss = orchestrator.rss_bytes()

        def watch() -> bool:
            page = orchestrator.metrics_text()
            seen.append({name: gauge(page, name) for name in ("in_flight", "queued", "backlog", "untrained_batches")})
            waits.add(str(orchestrator.health().get("waiting_for")))
            return str(STEPS - 1) in trainer.output.split()

        orchestrator.until(watch)
        assert orchestrator.rss_bytes() <= 1.1 * rss
        assert trainer.wait() == 0, trainer.output
        assert orchestrator.wait() == 0, orchestrator.output
    assert max(row["backlog"] for row in seen) == BACKLOG, "never full, or too full"
    assert all(row["in_flight"] + row["queued"] == row["backlog"] for row in seen)
    assert max(row["untrained_batches"] for row in seen) <= MAX_STALENESS + 1
    assert any("from the trainer" in what for what in waits), waits
    staleness = [row["staleness/all/max"] for row in read_metrics(config.run.path / "metrics" / "orchestrator.jsonl")]
    assert max(value for value in staleness if value is not None) == MAX_STALENESS
