"""What a run directory and its live services tell about a run, gathered without disturbing them.

Files are only read, no lock is tried, and every question to a service has a deadline. Works on a dead run, too.
"""

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from runtime.health.health import HEALTH_TIMEOUT_S, HealthReport, ask_health
from runtime.run_dir.run_dir import RunDir
from runtime.run_dir.service_lock import Holder, read_holder

NUM_LAST_LINES = 5
TAIL_BYTES = 64 << 10
MAX_RECORD_CHARS = 120
_REPORTED = ("last_trained", "last_committed")

Json = dict[str, object]


class Life(StrEnum):
    """Whether the process of a service exists."""

    RUNNING = "running"
    FROZEN = "frozen"
    """Stopped by SIGSTOP or a debugger."""
    GONE = "gone"
    UNKNOWN = "unknown"
    """It runs on another host: only its health endpoint can tell."""


@dataclass(frozen=True, slots=True)
class ServiceEvidence:
    """All that is known of one service."""

    name: str
    life: Life
    pid: int | None = None
    host: str = ""
    killed: Mapping[str, str] = field(default_factory=dict)
    """Services that it saw die of a signal, and its name: `{"inference": "SIGKILL"}`."""
    ended: str = ""
    """How it ended, in its own words; empty if it had no time for any (kill -9, out of memory, a stall)."""
    health: HealthReport = field(default_factory=dict)
    """What `/health` says; empty without an answer."""
    problem: str = ""
    """Why there is no answer from `/health`."""
    addresses: tuple[str, ...] = ()
    """Where it can be reached, `host:port`: peers name it by these."""
    last_lines: tuple[str, ...] = ()
    """End of its log."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A run at one moment."""

    run: str
    services: tuple[ServiceEvidence, ...]
    positions: Mapping[str, str]
    """How far each file of the run has come."""


def gather_evidence(
    run_dir: RunDir, timeout_s: float = HEALTH_TIMEOUT_S, known: Mapping[str, HealthReport] | None = None
) -> Evidence:
    """Look at everything; takes at most a little more than `timeout_s`. Services in `known` need not be asked."""
    names = {path.stem for pattern in ("*.lock", "*.json") for path in run_dir.services.glob(pattern)}
    with ThreadPoolExecutor(max_workers=16) as pool:
        services = tuple(
            pool.map(lambda name: _examine(run_dir, name, timeout_s, (known or {}).get(name, {})), sorted(names))
        )
    return Evidence(str(run_dir.path), services, read_positions(run_dir))


def _examine(run_dir: RunDir, name: str, timeout_s: float, health: HealthReport) -> ServiceEvidence:
    holder = read_holder(run_dir.services / f"{name}.lock")
    info = run_dir.read_services().get(name)
    if holder is None and info is not None:
        holder = Holder(pid=info.pid, host=info.host)
    life = find_life(holder, run_dir.services / f"{name}.lock")
    problem = ""
    if not health and info is not None and info.health_url and life is not Life.GONE:
        health, problem = ask_health(info.health_url, timeout_s)
    return ServiceEvidence(
        name=name,
        life=life,
        pid=holder.pid if holder else None,
        host=holder.host if holder else "",
        ended=holder.ended if holder else "",
        killed=holder.killed if holder else {},
        health=health,
        problem=problem,
        addresses=() if info is None else _netlocs([info.health_url, *info.addresses.values()]),
        last_lines=_last_lines(run_dir, name),
    )


def find_life(holder: Holder | None, lock: Path) -> Life:
    """Whether the process that took `lock` still has it. The lock itself is not tried: that could refuse a start."""
    if holder is None or holder.ended:
        return Life.GONE
    if holder.host != socket.gethostname():
        return Life.UNKNOWN
    try:
        stat = Path(f"/proc/{holder.pid}/stat").read_text()
    except OSError:
        return Life.GONE
    state = stat.rpartition(")")[2].split()[0]
    if state in "ZX" or not _has_open(holder.pid, lock):
        return Life.GONE
    return Life.FROZEN if state in "Tt" else Life.RUNNING


def _has_open(pid: int, path: Path) -> bool:
    """False if another process got the number of the dead holder. A process of another user is taken at its word."""
    target = str(path.resolve())
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
        return any(_link(f"/proc/{pid}/fd/{descriptor}") == target for descriptor in descriptors)
    except PermissionError:
        return True
    except OSError:  # it ended while we looked
        return False


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _netlocs(urls: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(netloc for url in urls if (netloc := netloc_of(url))))


def netloc_of(url: str) -> str:
    """`host:port` of a URL; empty if it has none."""
    return url.partition("://")[2].partition("/")[0]


def _last_lines(run_dir: RunDir, name: str) -> tuple[str, ...]:
    """End of the service's own log, else of the raw output that `rl` kept."""
    for suffix in ("log", "out"):
        lines = [line for line in read_tail(run_dir.logs / f"{name}.{suffix}").splitlines() if line.strip()]
        if lines:
            return tuple(lines[-NUM_LAST_LINES:])
    return ()


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
