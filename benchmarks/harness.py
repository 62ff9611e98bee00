"""What all benchmarks share: options, clock, memory, machine, and the file of the figures."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


def main(name: str, description: str | None, measure: Callable[..., Mapping[str, Any]], **options: float) -> None:
    """`python -m benchmarks.NAME [--option value] [--out FILE]`: print the figures of `measure(**options)`, keep them.

    The defaults of `options` say their types.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option, default in options.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    given = vars(parser.parse_args())
    out: Path = given.pop("out")
    text = json.dumps({"machine": machine(), **measure(**given)}, indent=2)
    print(text)
    out.write_text(text + "\n")


def machine() -> dict[str, object]:
    """Where the figures were taken, and what else ran there."""
    torch = sys.modules.get("torch")
    return {
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **({"torch": torch.__version__} if torch else {}),
    }


def best_s(action: Callable[[], object], repeats: int, clock: Callable[[], float] = time.process_time) -> float:
    """Shortest of `repeats` calls: what the code costs when nobody disturbs. CPU seconds, if `clock` is not another."""
    times = []
    for _ in range(repeats):
        started = clock()
        action()
        times.append(clock() - started)
    return min(times)


def memory_bytes(name: str = "VmRSS") -> int:
    """Resident memory of this process, or its peak (`VmHWM`). getrusage would count what the parent had at the fork."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
