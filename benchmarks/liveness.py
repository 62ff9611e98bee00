"""How fast a frozen or unreachable peer is noticed, and what a frozen trainer costs. Real orchestrator and trainer.

    python -m benchmarks.liveness [--times 20] [--frozen-minutes 10]

Each fault is made `--times` times: SIGSTOP of the trainer, SIGSTOP of the orchestrator, a black hole both ways.
Then the trainer is frozen for `--frozen-minutes` while the orchestrator's memory is measured. The figures go to section
`liveness` of `results/faults.json`; a peer noticed late, memory that grows, or a lost step is an error.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from benchmarks.fault_results import Figures, record
from tests.faults.chaos_proxy import Faults
from tests.faults.liveness.run import LiveRun, live_run
from tests.support.models import make_model, save_model
from tests.support.process import NOTICE_S, Service, frozen

MAX_RSS_GROWTH = 0.1
SAMPLE_S = 1.0
FULL_TIMES, FULL_MINUTES = 20, 10.0
"""A shorter run is recorded beside the full one, in section `liveness_short`."""

Fault = Callable[[LiveRun], AbstractContextManager[None]]


def misses_trainer(run: LiveRun) -> bool:
    """Whether the orchestrator says that the trainer is not there."""
    return run.orchestrator.health().get("trainer_ranks") == 0


def misses_orchestrator(run: LiveRun) -> bool:
    """Whether the trainer says that the orchestrator is not there."""
    return run.trainer.health().get("orchestrator") not in (None, "connected")


@contextmanager
def black_hole(run: LiveRun) -> Iterator[None]:
    """Nothing passes while the block lasts; connections stay open."""
    run.proxy.faults = Faults(black_hole=True)
    try:
        yield
    finally:
        run.proxy.faults = Faults()


def measure(run: LiveRun, fault: Fault, watcher: Service, is_missed: Callable[[LiveRun], bool], times: int) -> Figures:
    """Make `fault` again and again. Fails if it is not noticed in time, or if training does not go on."""
    noticed, resumed = [], []
    for _ in range(times):
        run.advance()
        watcher.until(lambda: not is_missed(run))
        with fault(run):
            noticed.append(watcher.until(lambda: is_missed(run), within_s=NOTICE_S))
        step, started = run.step(), time.monotonic()
        watcher.until(lambda before=step: run.step() > before)
        resumed.append(time.monotonic() - started)
    return {
        "times": times,
        "noticed_s_median": round(statistics.median(noticed), 2),
        "noticed_s_max": round(max(noticed), 2),
        "next_step_s_max": round(max(resumed), 2),
    }


def freeze_long(run: LiveRun, minutes: float) -> Figures:
    """Memory of the orchestrator while the trainer is frozen."""
    run.advance()
    with frozen(run.trainer):
        run.orchestrator.until(lambda: misses_trainer(run))
        first = run.orchestrator.rss_bytes()
        samples = [first]
        deadline = time.monotonic() + 60 * minutes
        while time.monotonic() < deadline:
            time.sleep(SAMPLE_S)  # a sampling period
            samples.append(run.orchestrator.rss_bytes())
    growth = max(samples) / first - 1
    assert growth <= MAX_RSS_GROWTH, f"memory grew by {growth:.1%} while the trainer was frozen"
    run.advance()
    return {"minutes": minutes, "rss_mb": round(first / 2**20, 1), "rss_growth_share": round(growth, 4)}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=FULL_TIMES)
    parser.add_argument("--frozen-minutes", type=float, default=FULL_MINUTES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="liveness-") as name:
        model = save_model(Path(name) / "model", make_model())
        with live_run(Path(name) / "runs", model, max_staleness=2, stall_timeout_s=86_400.0) as run:
            trainer, orchestrator, times = run.trainer, run.orchestrator, arguments.times
            found: dict[str, Figures] = {
                "frozen_trainer": measure(run, lambda run: frozen(run.trainer), orchestrator, misses_trainer, times),
                "frozen_orchestrator": measure(
                    run, lambda run: frozen(run.orchestrator), trainer, misses_orchestrator, times
                ),
                "half_open_seen_by_orchestrator": measure(run, black_hole, orchestrator, misses_trainer, times),
                "half_open_seen_by_trainer": measure(run, black_hole, trainer, misses_orchestrator, times),
                "trainer_frozen_long": freeze_long(run, arguments.frozen_minutes),
            }
            steps = run.steps()
    assert steps == list(range(1, len(steps) + 1)), "a step was lost or trained twice"
    print(found)
    is_full = arguments.times >= FULL_TIMES and arguments.frozen_minutes >= FULL_MINUTES
    record("liveness" if is_full else "liveness_short", {**found, "steps": len(steps)})


if __name__ == "__main__":
    main()
