"""A long run whose connections are cut every two seconds, while memory, descriptors and threads are counted.

    python -m benchmarks.soak --minutes 30

Real orchestrator (scripted engine) and real trainer (tiny model on the CPU); steps come about a thousand times as fast
as in earnest. The figures go to section `soak` of `results/faults.json`; growth above the limits is an error.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.fault_results import Figures, record
from tests.faults.exactly_once.campaign import make_model
from tests.faults.liveness.soak import Soak, soak

MAX_RSS_SHARE, MAX_FDS, MAX_THREADS = 0.1, 2, 1
"""What may be more in the last quarter of the soak than in its second."""
INTERVAL_S = 1.0
FULL_MINUTES = 30.0
"""A shorter soak is recorded beside the full one, in section `soak_short`."""


def figures(running: Soak, minutes: float, num_steps: int) -> Figures:
    """What is recorded."""
    return {
        "minutes": minutes,
        "steps": num_steps,
        "connection_cuts": running.num_cuts,
        "services": {each.name: _usage(running, each.name) for each in running.services},
    }


def _usage(running: Soak, name: str) -> Figures:
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


def complaints(running: Soak) -> list[str]:
    """What grew beyond its limit."""
    limits = {"rss_share": MAX_RSS_SHARE, "fds": MAX_FDS, "threads": MAX_THREADS}
    grown = {each.name: running.growth(each.name) for each in running.services}
    return [
        f"{name}: {key} grew by {getattr(growth, key):g}, the limit is {limit:g}"
        for name, growth in grown.items()
        for key, limit in limits.items()
        if getattr(growth, key) > limit
    ]


def main() -> None:
    """Soak, record, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=FULL_MINUTES)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        model = make_model(Path(folder) / "model")
        with soak(Path(folder) / "runs", model, real_trainer=True) as running:
            first = running.step()
            running.watch(minutes * 60, INTERVAL_S)
            num_steps = running.step() - first
    found = figures(running, minutes, num_steps)
    print(found)
    if problems := complaints(running):
        sys.exit("; ".join(problems))
    record("soak" if minutes >= FULL_MINUTES else "soak_short", found)


if __name__ == "__main__":
    main()
