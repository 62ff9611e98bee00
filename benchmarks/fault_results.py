"""`results/faults.json`: one section per kind of fault, each written by the run that measured it.

    record("exactly_once", {"kills": 200, "weights_equal": True})

Drivers of different faults may finish at the same time: a section replaces itself and leaves the others alone.
"""

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

Figure = str | int | float | bool | None
Figures = Mapping[str, "Figure | Figures | Sequence[Figure | Figures]"]

RESULTS = Path(__file__).parent / "results" / "faults.json"


def record(section: str, figures: Figures, path: Path = RESULTS) -> None:
    """Replace `section` of the results file, adding when and on what machine it was measured.

    The file is replaced as a whole under a lock: a reader, or a crash, sees the old figures or the new ones. Raises
    `ValueError` for figures that JSON cannot hold (NaN, infinity).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        sections = json.loads(path.read_text()) if path.exists() else {}
        sections[section] = {"measured": _circumstances(), **figures}
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(json.dumps(sections, indent=2, sort_keys=True, allow_nan=False) + "\n")
        os.replace(temporary, path)


def _circumstances() -> Figures:
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
