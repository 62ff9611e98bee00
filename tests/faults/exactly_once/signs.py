"""Signs on disk of what a process is doing: where to aim a kill, and where a kill has hit.

A sign is a token (path, inode, time) or `None`. Files that a killed process leaves behind show the same token for ever,
so a sign counts only if its token is not the one that stood there when the process started.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Token = tuple[str, int, int]
Sign = Callable[[Path], Token | None]


@dataclass(frozen=True)
class Progress:
    """What the outbox has on record."""

    last_committed: int
    last_retired: int


def token(path: Path) -> Token | None:
    """Which file this is; `None` if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return path.name, status.st_ino, status.st_mtime_ns


def read_progress(run: Path) -> Progress:
    """Zeros before the first report."""
    try:
        content = json.loads((run / "outbox" / "progress.json").read_bytes())
    except FileNotFoundError:
        return Progress(0, 0)
    return Progress(content.get("last_committed", 0), content.get("last_retired", 0))


def steps_of(folder: Path, pattern: str) -> Iterator[tuple[int, Path]]:
    """`step-00000012...` entries of a folder, newest first."""
    for path in sorted(folder.glob(pattern), reverse=True):
        yield int(path.name.removeprefix("step-")[:8]), path


def storing_batch(run: Path) -> Token | None:
    """The outbox writes a batch."""
    return next((token(path) for path in (run / "outbox").glob("step-*.tmp")), None)


def batch_announced_nowhere(run: Path) -> Token | None:
    """The state of the next cut is durable, its batch is not."""
    path = run / "state" / "orchestrator.json"
    try:
        step = json.loads(path.read_bytes())["step"]
    except FileNotFoundError:
        return None
    newest = next((number for number, _ in steps_of(run / "outbox", "step-*.batch")), read_progress(run).last_committed)
    return token(path) if step > newest else None


def newest_batch(run: Path) -> Token | None:
    """A batch has just become durable."""
    return next((token(path) for _, path in steps_of(run / "outbox", "step-*.batch")), None)


def report_recorded(run: Path) -> Token | None:
    """What the trainer reported is durable; it may not have been told yet."""
    return token(run / "outbox" / "progress.json")


def saving_checkpoint(run: Path) -> Token | None:
    """A checkpoint without its manifest."""
    folders = (path for _, path in steps_of(run / "checkpoints", "step-*"))
    return next((token(path) for path in folders if not (path / "manifest.json").exists()), None)


def saved_not_committed(run: Path) -> Token | None:
    """A whole checkpoint that the orchestrator has no record of."""
    committed = read_progress(run).last_committed
    saved = ((step, path / "manifest.json") for step, path in steps_of(run / "checkpoints", "step-*"))
    return next((shown for step, path in saved if step > committed and (shown := token(path))), None)


def publishing_weights(run: Path) -> Token | None:
    """A publish under its temporary name."""
    return next((token(path) for path in (run / "weights").glob(".v*")), None)


def run_over(run: Path) -> Token | None:
    """The last step is committed."""
    try:
        max_steps = json.loads((run / "config" / "orchestrator.json").read_bytes())["max_steps"]
    except FileNotFoundError:
        return None
    return token(run / "outbox" / "progress.json") if read_progress(run).last_committed >= max_steps else None


SIGNS: Mapping[str, Mapping[str, Sign]] = {
    "orchestrator": {
        "storing a batch": storing_batch,
        "state saved, batch not stored": batch_announced_nowhere,
        "batch stored": newest_batch,
        "report recorded": report_recorded,
    },
    "trainer": {
        "saving a checkpoint": saving_checkpoint,
        "saved, not committed": saved_not_committed,
        "publishing weights": publishing_weights,
    },
}
"""By service. The first that shows names the instant at which a process died."""

LASTING = frozenset({"batch stored", "report recorded"})
"""Signs that stay: good to aim at, no evidence of where a kill has hit."""
