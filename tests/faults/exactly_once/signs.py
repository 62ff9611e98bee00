"""Signs on disk of what a process is doing: where to aim a kill, and where a kill has hit.

A sign is a token (path, inode, time) or `None`. Files that a killed process leaves behind show the same token for ever,
so a sign counts only if its token is not the one that stood there when the process started.

What a finished run left behind, and what must be true of it whatever happened on the way.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.records.ledger import LEDGER_NAME, read_ledger
from tests.support.metrics import read_metrics
from transport.wire.ledger import Tally, tally

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

MAX_STALENESS = 2


@dataclass(frozen=True)
class Result:
    """What must be equal in two runs with the same seeds."""

    weights: str
    """sha256 of the last published safetensors files."""
    state: str
    """sha256 of the last checkpoint's tensors: weights, optimizer moments, random state."""
    progress: str
    """Steps, samples and tokens that the last checkpoint says were trained."""
    trained: tuple[int, ...]
    """Rollouts trained at each step, by the ledger."""


def sha256(paths: Iterable[Path]) -> str:
    """Of the files' bytes, end to end. There must be at least one."""
    files = sorted(paths)
    assert files
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def tensors_sha256(paths: Iterable[Path]) -> str:
    """Of safetensors files: their tables of contents with sorted keys (their metadata comes in any order), and data."""
    files = sorted(paths)
    assert files
    state = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        state.update(json.dumps(json.loads(content[8:start]), sort_keys=True).encode())
        state.update(content[start:])
    return state.hexdigest()


def result_of(run: Path, max_steps: int) -> Result:
    """The result of a finished run."""
    checkpoint = run / "checkpoints" / f"step-{max_steps:08d}"
    states = read_tally(run).states
    return Result(
        weights=sha256((run / "weights" / f"v{max_steps:08d}").glob("*.safetensors")),
        state=tensors_sha256(checkpoint.glob("*.safetensors")),
        progress=(checkpoint / "progress.json").read_text(),
        trained=tuple(states[f"trained@{step}"] for step in range(1, max_steps + 1)),
    )


@dataclass(frozen=True)
class Account:
    """What a finished run says of itself, added up."""

    num_cancelled: int
    """Rollouts that were generated again."""
    lineage: tuple[int, ...]
    """The steps that led to the final weights, in order."""
    num_vain_steps: int
    """Steps that were trained and taken back by a return to a checkpoint."""


def check_finished(run: Path, max_steps: int) -> Account:
    """Every promise that can be checked on one run alone."""
    ledger = check_ledger(run, max_steps)
    check_outbox(run, max_steps)
    staleness = [row["staleness/all/max"] for row in read_metrics(run / "metrics" / "orchestrator.jsonl")]
    assert all(worst is not None and worst <= MAX_STALENESS for worst in staleness)
    lineage, num_vain_steps = read_lineage(run)
    assert lineage == tuple(range(1, max_steps + 1))
    return Account(ledger.states["cancelled"], lineage, num_vain_steps)


def read_tally(run: Path) -> Tally:
    """The ledger, added up."""
    return tally(read_ledger(run / "ledger" / LEDGER_NAME))


def check_ledger(run: Path, max_steps: int) -> Tally:
    """It balances, nothing is in flight any more, and every step was trained."""
    ledger = read_tally(run)
    assert ledger.balances, ledger.problems
    assert not ledger.states["in_flight"]
    trained = {int(state.removeprefix("trained@")) for state in ledger.states if state.startswith("trained@")}
    assert trained == set(range(1, max_steps + 1))
    return ledger


def read_lineage(run: Path) -> tuple[tuple[int, ...], int]:
    """The steps that led to the final weights, and the number of those that did not, from the trainer's metrics.

    A trainer that goes back to checkpoint C takes everything after C back. The row of a step is written before its
    checkpoint, so no step of the lineage is without one.
    """
    lineage: list[int] = []
    num_vain = 0
    for row in read_metrics(run / "metrics" / "trainer.jsonl"):
        step = row["step"]
        assert step is not None
        while lineage and lineage[-1] >= step:
            lineage.pop()
            num_vain += 1
        lineage.append(int(step))
    return tuple(lineage), num_vain


def check_outbox(run: Path, max_steps: int) -> None:
    """All is committed; what is left are the batches of the newest checkpoint, kept in case it cannot be read back."""
    progress = read_progress(run)
    left = sorted(step for step, _ in steps_of(run / "outbox", "step-*.batch"))
    assert progress.last_committed == max_steps
    assert left == list(range(progress.last_retired + 1, max_steps + 1))


class RetirementWatch:
    """Looks, while the run goes on, that no batch goes that no whole checkpoint contains."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def look(self) -> None:
        """Compare the outbox's record with the checkpoints on disk."""
        retired = read_progress(self._run).last_retired
        folders = steps_of(self._run / "checkpoints", "step-*")
        newest = next((step for step, path in folders if (path / "manifest.json").exists()), 0)
        assert retired <= newest, f"batches up to {retired} are gone, the newest checkpoint is {newest}"
