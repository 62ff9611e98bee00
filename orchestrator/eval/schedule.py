"""Which policy versions are evaluated, and which of them are done. A result file is the record: no file, not done."""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from runtime.base.files import atomic_write

_NAME = re.compile(r"eval-v(\d{8})\.json")


def due_version(last_done: int, every_steps: int, max_steps: int) -> int | None:
    """The first version after `last_done` (-1: none) that is due: multiples of `every_steps`, and the last one."""
    if last_done >= max_steps:
        return None
    return min((last_done // every_steps + 1) * every_steps, max_steps)


def result_path(folder: Path, version: int) -> Path:
    """Where the figures of `version` lie."""
    return folder / f"eval-v{version:08d}.json"


def last_evaluated(folder: Path) -> int:
    """The newest version that has been evaluated; -1 before the first."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("eval-v*.json"))
    return max((int(match[1]) for match in found if match), default=-1)


def save_result(folder: Path, version: int, values: Mapping[str, float]) -> None:
    """Keep the figures, durably. Raises `OSError`."""
    atomic_write(result_path(folder, version), msgspec.json.encode({"version": version, "metrics": values}))
