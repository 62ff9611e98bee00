"""What a finished run left behind, and what must be true of it whatever happened on the way."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.records.ledger import LEDGER_NAME, read_ledger
from tests.faults.exactly_once.signs import read_progress, steps_of
from tests.support.metrics import read_metrics
from transport.wire.ledger import Tally, tally

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
