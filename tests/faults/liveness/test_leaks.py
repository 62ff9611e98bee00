"""Row 26: nothing leaks. `--minutes 30` is the long form (`make faults`), with a real trainer.

A soak: a run that goes on and on, its connections cut now and then, while memory, descriptors, threads are counted.

The orchestrator is the real one with the scripted engine, so steps come about a thousand times as fast as in earnest.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.faults.chaos_proxy import ChaosProxy
from tests.faults.conftest import Figures, Record
from tests.faults.exactly_once.fixed_run import FixedRun
from tests.faults.liveness.run import FOREVER
from tests.support.process import Service, service

CUT_EVERY_S = 2.0
"""Seconds between two resets of all connections: what a reconnect leaks shows within minutes."""


@dataclass(frozen=True)
class Usage:
    """What a process holds at one moment."""

    rss_bytes: int
    fds: int
    threads: int


@dataclass(frozen=True)
class Growth:
    """From the second quarter of a soak to its last, in medians: start-up is over, and single peaks do not count."""

    rss_share: float
    """Relative: 0.01 is one per cent."""
    fds: int
    threads: int


@dataclass
class Soak:
    """A run under way. `watch` lets time pass and takes notes."""

    services: Sequence[Service]
    proxy: ChaosProxy
    usage: dict[str, list[Usage]] = field(default_factory=dict)
    num_cuts: int = 0
    _next_cut: float = 0.0

    def step(self) -> int:
        """Newest step whose batch was cut."""
        return int(self.services[0].health().get("step") or 0)

    def watch(self, duration_s: float, interval_s: float) -> None:
        """Count every `interval_s`, for `duration_s`. Fails if a service ends."""
        deadline = time.monotonic() + duration_s
        while (now := time.monotonic()) < deadline:
            if now >= self._next_cut:
                self._next_cut, self.num_cuts = now + CUT_EVERY_S, self.num_cuts + 1
                self.proxy.cut()
            for each in self.services:
                assert each.poll() is None, f"{each.name} ended:\n{each.output[-4000:]}"
                self.usage.setdefault(each.name, []).append(measure(each))
            time.sleep(interval_s)  # a sampling period, not a wait for something

    def growth(self, name: str) -> Growth:
        """How much more `name` holds in the end."""
        return find_growth(self.usage[name])


def measure(target: Service) -> Usage:
    """What `target` holds now."""
    process = psutil.Process(target.pid)
    return Usage(process.memory_info().rss, process.num_fds(), process.num_threads())


def find_growth(usage: Sequence[Usage]) -> Growth:
    """Compare quarters. Pure."""
    quarter = len(usage) // 4
    early, late = usage[quarter : 2 * quarter], usage[-quarter:]

    def median(samples: Sequence[Usage], name: str) -> float:
        return float(statistics.median(getattr(sample, name) for sample in samples))

    rss = median(early, "rss_bytes")
    return Growth(
        rss_share=(median(late, "rss_bytes") - rss) / rss,
        fds=round(median(late, "fds") - median(early, "fds")),
        threads=round(median(late, "threads") - median(early, "threads")),
    )


@contextmanager
def soak(folder: Path, model: Path, *, real_trainer: bool) -> Iterator[Soak]:
    """A run that trains, through a proxy."""
    fixed = FixedRun(folder, "soak", model, max_steps=FOREVER, checkpoint_steps=50)
    with ExitStack() as stack:
        proxy = stack.enter_context(ChaosProxy(fixed.port))
        flags = (*fixed.orchestrator(), "--no-save-rollouts")
        orchestrator = stack.enter_context(service("orchestrator", fixed.path, "orchestrator", *flags))
        orchestrator.until(lambda: orchestrator.health().get("status") == "ok")
        endpoint = f"tcp://127.0.0.1:{proxy.port}"
        if real_trainer:
            module, arguments = "trainer", fixed.trainer("--orchestrator.endpoint", endpoint)
        else:
            module, arguments = "tests.faults.liveness.light_trainer", [endpoint, fixed.name, "0"]
        trainer = stack.enter_context(service("trainer", fixed.path, module, *arguments))
        running = Soak((orchestrator, trainer), proxy)
        orchestrator.until(lambda: running.step() >= 10)
        yield running


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
