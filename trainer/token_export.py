"""`TokenExport`: per-token records of some sequences of every step, for people and their notebooks.

    <dir>/step-00000012/rank-00000.jsonl     one line per chosen sequence that the rank trained
    <dir>/step-00000012/STABLE               written last: every rank's file is there and whole

Which sequences are chosen depends on seed and step alone, so all ranks agree and a replayed step chooses the same. The
export never changes training: a disk that is full costs the records of the step, and one warning.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
from loguru import logger

from runtime.base.files import atomic_write
from trainer.config import TokenExportConfig
from trainer.distributed import Ranks
from trainer.plan import StepPlan
from trainer.token_record import TokenRecorder
from transport.wire.sample import TrainingSample

STABLE = "STABLE"
_FAILED = b"failed"


class TokenExport:
    """Writes below `folder`. `write` is a collective call; a rank whose `writes` is false takes part without a file."""

    def __init__(
        self, config: TokenExportConfig, folder: Path, ranks: Ranks, seed: int, *, writes: bool = True
    ) -> None:
        self._config = config
        self._folder = folder
        self._ranks = ranks
        self._seed = seed
        self._writes = writes
        self._has_warned = False

    def recorder(self, plan: StepPlan, samples: Mapping[int, TrainingSample]) -> TokenRecorder:
        """What watches the training of this batch."""
        limit = self._config.max_sequences_per_step
        rows = choose_rows(len(plan.lengths), (self._seed, plan.step), self._config.sampling_rate, limit)
        return TokenRecorder(plan.step, rows, samples, self._ranks.rank)

    def write(self, recorder: TokenRecorder) -> None:
        """Write what was recorded; `STABLE` only if every rank could. Replaces what was written before a crash, by
        however many ranks."""
        folder = step_folder(self._folder, recorder.step)
        self._first_rank(folder, lambda: (folder / STABLE).unlink(missing_ok=True))
        written = self._ranks.gather(self._ranks.wait_together(lambda: self._attempt(folder, recorder)))
        if _FAILED not in written:
            self._first_rank(folder, lambda: _complete(folder, {name.decode() for name in written}))

    def _first_rank(self, folder: Path, work: Callable[[], None]) -> None:
        """The others wait for it: a disk may take longer than they would in a collective."""
        self._ranks.wait_together(lambda: self._ranks.is_first and self._tried(folder, work))

    def _attempt(self, folder: Path, recorder: TokenRecorder) -> bytes:
        """The name of the file that was written; empty if this rank does not write any."""
        if not self._writes:
            return b""
        name = f"rank-{self._ranks.rank:05d}.jsonl"
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in recorder.records())
        return name.encode() if self._tried(folder, lambda: _write(folder / name, lines)) else _FAILED

    def _tried(self, folder: Path, work: Callable[[], None]) -> bool:
        try:
            work()
        except OSError as error:  # records are a help for people: training goes on without them
            if not self._has_warned:
                logger.warning(f"token export: {folder} cannot be written, its records are lost: {error}")
            self._has_warned = True
            return False
        return True


def _write(path: Path, lines: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lines)


def _complete(folder: Path, names: set[str]) -> None:
    """Every file is there: remove those of ranks that are no more, and say that the rest is whole."""
    for path in folder.glob("rank-*.jsonl"):
        if path.name not in names:
            path.unlink()
    _write(folder / STABLE, b"")


def step_folder(folder: Path, step: int) -> Path:
    """Where the files of one step are."""
    return folder / f"step-{step:08d}"


def choose_rows(num_rows: int, seed: tuple[int, int], rate: float, limit: int) -> frozenset[int]:
    """Each row with probability `rate`, at most `limit` of them, all alike likely to stay."""
    draws = np.random.default_rng(seed).random(num_rows)
    first = np.argsort(draws, kind="stable")[:limit]
    return frozenset(first[draws[first] < rate].tolist())
