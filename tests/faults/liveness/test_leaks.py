"""Row 26: nothing leaks. `--minutes 30` is the long form (`make faults`), with a real trainer."""

from pathlib import Path

import pytest

from tests.faults.conftest import Figures, Record
from tests.faults.liveness.soak import Soak, Usage, find_growth, soak

SOAK_MINUTES = 0.2
RSS_GROWTH, LONG_RSS_GROWTH = 0.05, 0.1
"""Of about 150 MB; a real trainer has 390. Hundreds of steps pass: a leak of one batch per step would be more."""


@pytest.mark.integration
@pytest.mark.long
def test_steps_and_reconnects_leak_neither_memory_nor_descriptors_nor_threads(
    tmp_path: Path, random_model: Path, minutes: float | None, record: Record
) -> None:
    with soak(tmp_path / "runs", random_model, real_trainer=minutes is not None) as running:
        first = running.step()
        running.watch(60 * (minutes or SOAK_MINUTES), interval_s=1.0 if minutes else 0.1)
        num_steps = running.step() - first
    assert num_steps > 50
    assert running.num_cuts >= 5
    for name in ("orchestrator", "trainer"):
        growth = running.growth(name)
        assert abs(growth.fds) <= 2, (name, growth)
        assert abs(growth.threads) <= 1, (name, growth)
        assert growth.rss_share <= (LONG_RSS_GROWTH if minutes else RSS_GROWTH), (name, growth)
    usage = {each.name: usage_of(running, each.name) for each in running.services}
    record("soak", {"minutes": minutes, "steps": num_steps, "connection_cuts": running.num_cuts, "services": usage})


def usage_of(running: Soak, name: str) -> Figures:
    """What is kept of one service."""
    usage, growth = running.usage[name], running.growth(name)
    return {
        "rss_mb_first": round(usage[0].rss_bytes / 2**20, 1),
        "rss_mb_last": round(usage[-1].rss_bytes / 2**20, 1),
        "rss_mb_max": round(max(each.rss_bytes for each in usage) / 2**20, 1),
        "rss_growth_share": round(growth.rss_share, 4),
        "fds_last": usage[-1].fds,
        "fds_growth": growth.fds,
        "threads_growth": growth.threads,
    }


def test_leak_is_seen_in_spite_of_a_start_and_of_peaks() -> None:
    warm = [Usage(rss_bytes=50 + index, fds=5, threads=2) for index in range(25)]
    steady = [Usage(rss_bytes=100, fds=10, threads=4)] * 75
    assert find_growth(warm + steady).rss_share == 0
    peak = Usage(rss_bytes=900, fds=99, threads=40)
    growth = find_growth([*warm, *steady[:-1], peak])
    assert (growth.rss_share, growth.fds, growth.threads) == (0, 0, 0)
    leaking = [Usage(rss_bytes=100 + index, fds=10 + index // 10, threads=4 + index // 20) for index in range(100)]
    growth = find_growth(leaking)
    assert growth.rss_share == pytest.approx(50 / 137, abs=0.01)
    assert (growth.fds, growth.threads) == (5, 3)
