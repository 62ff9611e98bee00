"""`History`: one line per batch, in `state/history.jsonl`: what the curricula of a run must know of all its batches.

A line is durable before its batch is, like the ledger's. Opening cuts off lines of batches that did not become durable
(`state.py` says when that happens): they are made again. A run without a curriculum has no history.
"""

import os
from pathlib import Path

import msgspec

from orchestrator.data.curriculum import Curricula, Lesson
from orchestrator.errors import StateMismatchError
from orchestrator.values.group import AssembledBatch

HISTORY_NAME = "history.jsonl"


class HistoryRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is remembered of batch `step`. Lines of earlier versions have sums beside it, which are not read."""

    step: int
    lessons: dict[str, Lesson] = {}
    """By environment."""


class History:
    """The writer. Blocking. Opening teaches `curricula` what they knew; raises `StateMismatchError` for a file that
    does not decode, or that does not end with the batch before `next_step`."""

    def __init__(self, path: Path, next_step: int, curricula: Curricula) -> None:
        self._path = path
        self._curricula = curricula
        self._newest_step = 0
        path.touch()
        self._begin = self._end = self._read(next_step)
        if self._newest_step != next_step - 1:
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
                self._newest_step = record.step
                self._curricula.restore(record.lessons)
                end += len(line)
        return end

    def _decode(self, line: bytes) -> HistoryRecord:
        try:
            return msgspec.json.decode(line, type=HistoryRecord)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise StateMismatchError(f"cannot read the history {self._path}: {error}; move it away") from error

    def write(self, batch: AssembledBatch) -> None:
        """Make the line of a batch durable; safe to repeat for the same batch. Raises `OSError`."""
        line = msgspec.json.encode(HistoryRecord(batch.step, self._curricula.lessons(batch.groups))) + b"\n"
        begin = self._begin if batch.step == self._newest_step else self._end
        with self._path.open("r+b") as file:
            file.truncate(begin)
            file.seek(begin)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._begin, self._end, self._newest_step = begin, begin + len(line), batch.step
