"""`History`: one line per cut, in `state/history.jsonl`: what must be known of all batches so far, not of the last one.

A line is durable before its batch is, like the ledger's. Opening cuts off lines of batches that did not become durable
(`state.py` says when that happens): they are made again. A run that is older than its history begins one where it
stands.
"""

import os
from pathlib import Path

import msgspec

from orchestrator.curriculum.curricula import Curricula, Lesson
from orchestrator.errors import StateMismatchError
from orchestrator.lineup import Cut
from orchestrator.selection import Selection, select

HISTORY_NAME = "history.jsonl"


class CutRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is remembered of batch `step`."""

    step: int
    selections: dict[str, Selection] = {}
    """By environment."""
    lessons: dict[str, Lesson] = {}
    """For the curricula, by environment."""


class History:
    """The writer. Blocking. Opening teaches `curricula` what they knew; raises `StateMismatchError` for a file that
    does not decode, or that has gaps which they cannot do without."""

    def __init__(self, path: Path, next_step: int, curricula: Curricula) -> None:
        self.totals: dict[str, Selection] = {}
        """Sums over all batches up to the one written last, by environment."""
        self._path = path
        self._curricula = curricula
        self._newest_step = 0
        path.touch()
        self._begin = self._end = self._read(next_step)
        if curricula.by_env and self._newest_step != next_step - 1:
            raise StateMismatchError(
                f"the history {path} ends with batch {self._newest_step}, the run with {next_step - 1}: its curriculum "
                "cannot go on. Restore the file or choose another --run.name"
            )

    def _read(self, next_step: int) -> int:
        """Take in the lines of durable batches; where they end."""
        end = 0
        with self._path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                record = self._decode(line)
                if record.step >= next_step:
                    break
                self._add(record)
                self._curricula.restore(record.lessons)
                end += len(line)
        return end

    def _decode(self, line: bytes) -> CutRecord:
        try:
            return msgspec.json.decode(line, type=CutRecord)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise StateMismatchError(f"cannot read the history {self._path}: {error}; move it away") from error

    def write(self, cut: Cut) -> None:
        """Make the line of a batch durable; safe to repeat for the same batch. Raises `OSError`."""
        selections = {name: select(groups) for name, groups in cut.by_env.items()}
        record = CutRecord(cut.step, selections, self._curricula.lessons(cut.groups))
        again = record.step == self._newest_step
        begin = self._begin if again else self._end
        line = msgspec.json.encode(record) + b"\n"
        with self._path.open("r+b") as file:
            file.truncate(begin)
            file.seek(begin)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._begin, self._end = begin, begin + len(line)
        if not again:
            self._add(record)

    def _add(self, record: CutRecord) -> None:
        self._newest_step = record.step
        for name, selection in record.selections.items():
            self.totals[name] = self.totals.get(name, Selection()) + selection
