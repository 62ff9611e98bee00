"""How far the files of a run have come, as `rl doctor` shows it. Reads only; what does not exist is left out."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from runtime.run_dir import RunDir

TAIL_BYTES = 64 << 10
MAX_RECORD_CHARS = 120

Json = dict[str, object]


def read_positions(run_dir: RunDir) -> dict[str, str]:
    """Positions by name, in the order that batches travel: metrics, ledger, outbox, checkpoints, weights."""
    return (
        _metric_steps(run_dir.metrics)
        | _ledger_ends(run_dir.ledger)
        | _outbox(run_dir.outbox)
        | _newest("newest whole checkpoint", run_dir.checkpoints.glob("step-*/manifest.json"))
        | _newest("newest published version", run_dir.weights.glob("v*/manifest.json"))
    )


def read_tail(path: Path) -> str:
    """The last part of a text file; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _metric_steps(folder: Path) -> dict[str, str]:
    last = {path.stem: _last_record(path).get("step") for path in sorted(folder.glob("*.jsonl"))}
    return {f"last step of {name}": f"{step:g}" for name, step in last.items() if isinstance(step, int | float)}


def _ledger_ends(folder: Path) -> dict[str, str]:
    last = {path.stem: _last_record(path) for path in sorted(folder.glob("*.jsonl"))}
    return {f"ledger of {name}": json.dumps(record)[:MAX_RECORD_CHARS] for name, record in last.items() if record}


def _outbox(folder: Path) -> dict[str, str]:
    steps = [_number(path) for path in folder.glob("step-*.batch")]
    found = {"batches in the outbox": f"{min(steps)} to {max(steps)}"} if steps else {}
    progress = _read_json(folder / "progress.json")
    found |= {f"{key.replace('_', ' ')} step": str(progress[key]) for key in _REPORTED if key in progress}
    weights = progress.get("weights")
    return found | ({"announced version": str(weights.get("version"))} if isinstance(weights, dict) else {})


_REPORTED = ("last_trained", "last_committed")


def _newest(label: str, manifests: Iterable[Path]) -> dict[str, str]:
    numbers = [_number(path.parent) for path in manifests]
    return {label: str(max(numbers))} if numbers else {}


def _number(path: Path) -> int:
    return int("0" + "".join(filter(str.isdigit, path.name)))


def _last_record(path: Path) -> Json:
    """The last whole line that is a JSON object."""
    for line in reversed(read_tail(path).rpartition("\n")[0].splitlines()):
        if record := _parse(line.encode()):
            return record
    return {}


def _read_json(path: Path) -> Json:
    try:
        return _parse(path.read_bytes())
    except OSError:
        return {}


def _parse(data: bytes) -> Json:
    try:
        content = json.loads(data)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
