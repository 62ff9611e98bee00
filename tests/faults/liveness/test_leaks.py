"""Row 26: nothing leaks. The short form; `python -m benchmarks.soak --minutes 30` is the long one."""

from pathlib import Path

import pytest

from tests.faults.liveness.soak import Usage, find_growth, soak

SOAK_S = 12.0
RSS_GROWTH = 0.05
"""Of about 150 MB. Hundreds of steps pass: a leak of one batch per step would be more."""


@pytest.mark.integration
def test_steps_and_reconnects_leak_neither_memory_nor_descriptors_nor_threads(tmp_path: Path, model: Path) -> None:
    with soak(tmp_path / "runs", model, real_trainer=False) as running:
        first = running.step()
        running.watch(SOAK_S, interval_s=0.1)
        num_steps = running.step() - first
    assert num_steps > 50
    assert running.num_cuts >= 5
    for name in ("orchestrator", "trainer"):
        growth = running.growth(name)
        assert abs(growth.fds) <= 2, (name, growth)
        assert abs(growth.threads) <= 1, (name, growth)
        assert growth.rss_share <= RSS_GROWTH, (name, growth)


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
