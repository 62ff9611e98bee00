"""The benchmarks of the orchestrator measure something, in miniature."""

import subprocess
import sys

import pytest

from benchmarks import async_vs_sync, http_client, scheduler


async def test_the_scheduler_benchmark_counts_rollouts_lag_and_memory() -> None:
    figures = await scheduler.measure(64, steps=8, rate=20_000.0, batch_size=32)
    assert figures["in_flight"] == 64
    assert all(float(figures[key]) > 0 for key in ("rollouts_per_cpu_s", "rollouts_per_s", "lag_p99_wall_ms"))
    assert float(figures["lag_p99_cpu_ms"]) <= float(figures["lag_p99_wall_ms"])


@pytest.mark.integration
async def test_a_run_that_may_be_stale_is_faster_and_unbiased() -> None:
    synchronous = await async_vs_sync.run_once(0, steps=6, median_s=0.1)
    stale = await async_vs_sync.run_once(4, steps=6, median_s=0.1)
    assert float(stale["steps_per_s"]) > float(synchronous["steps_per_s"])
    assert float(stale["trainer_idle"]) < float(synchronous["trainer_idle"])
    for figures in (synchronous, stale):
        assert figures["length_bias"] == pytest.approx(1.0, abs=0.2)
        assert 0 <= float(figures["waste"]) < 0.5


@pytest.mark.integration
async def test_every_policy_can_be_measured() -> None:
    figures = await async_vs_sync.run_once(1, steps=4, median_s=0.05, policy="drop")
    assert (figures["policy"], figures["max_staleness"]) == ("drop", 1)
    assert float(figures["steps_per_s"]) > 0
    assert 0 < float(figures["length_bias"]) < 2
    assert 0 <= float(figures["waste"]) < 1


@pytest.mark.integration
async def test_both_clients_get_their_answers() -> None:
    command = [sys.executable, http_client.__file__, http_client.SERVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: ASYNC220 - starts at once
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            figures = await http_client.measure(url, num_requests=8, repeats=1)
        finally:
            server.kill()
    assert set(figures) == {"http_engine", "openai", "openai_text"}
    assert all(value > 0 for value in figures.values())
