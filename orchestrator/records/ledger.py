"""`Ledger`: what became of every rollout that was ever dispatched, append-only, in `ledger/rollouts.jsonl`.

A dispatch is written at once, so that after a kill -9 the ledger knows what was in flight; `flush` makes it durable.
It is made durable *before* each batch (`state.py` says why): a durable batch always has its lines here.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from orchestrator.errors import LedgerError
from orchestrator.values.group import STALE, AssembledBatch, ScoredGroup, Ticket
from orchestrator.values.rollout import FailureReason, Rollout, RolloutFailure
from transport.wire.ledger import Cancelled, CancelReason, CompletedPositions, Dispatched, Record, Retried, Settled

LEDGER_NAME = "rollouts.jsonl"

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class Ledger:
    """The writer: one per run. Recording is for one thread (the loop's); `flush` may run in another.

    Opening cuts off a line that a killed process left torn, and takes back what is not part of a durable batch: every
    position that is not in `done` is generated again.
    """

    def __init__(self, path: Path, done: CompletedPositions) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._pending: list[Record] = []
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._size = _whole_lines(self._descriptor)
        os.ftruncate(self._descriptor, self._size)
        if self._size:
            self.cancelled(done, CancelReason.RESTART)

    def dispatched(self, ticket: Ticket) -> None:
        """A group was started. A disk that refuses is reported at the next batch: the line is kept until then."""
        self._pending.append(Dispatched(ticket.seq, ticket.key.id, ticket.size))
        with suppress(OSError):
            self._write()

    def retried(self, ticket: Ticket, index: int, failure: RolloutFailure) -> None:
        """A try failed and the rollout is started again. Written like a dispatch, which it is."""
        self._pending.append(Retried(ticket.seq, index, failed_state(failure)))
        with suppress(OSError):
            self._write()

    def settled(self, batch: AssembledBatch) -> None:
        """A batch is about to become durable: the fates of all its groups."""
        for scored in batch.groups:
            self._pending.append(Settled(scored.seq, terminal_states(scored, batch.step)))

    def cancelled(self, done: CompletedPositions, reason: CancelReason) -> None:
        """Nothing but what is at the positions in `done` was used."""
        self._pending.append(Cancelled(done.cursor, reason, done.beyond))

    def flush(self) -> None:
        """Make everything recorded so far durable. After an `OSError` nothing is lost: call it again."""
        self._write()
        os.fsync(self._descriptor)  # outside the lock: a dispatch must not wait for the disk

    def _write(self) -> None:
        with self._lock:
            records = self._pending[:]
            data = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
            try:
                _write_at(self._descriptor, data, self._size)
            except OSError:
                os.ftruncate(self._descriptor, self._size)  # no half line stays
                raise
            self._size += len(data)
            del self._pending[: len(records)]

    def close(self) -> None:
        """Write what is left. Idempotent."""
        if self._descriptor >= 0:
            self.flush()
            os.close(self._descriptor)
            self._descriptor = -1


def terminal_states(scored: ScoredGroup, step: int) -> tuple[str, ...]:
    """One state per rollout of a group of batch `step`, trained or not."""
    return tuple(_state(result, scored.filtered, step) for result in scored.group.results)


def failed_state(failure: RolloutFailure) -> str:
    """The state of a rollout, or of a try, that failed."""
    if failure.reason in (FailureReason.STALE, FailureReason.CANCELLED):
        return failure.reason.value
    return f"failed:{failure.reason.value}"


def _state(result: Rollout | RolloutFailure, filtered: str | None, step: int) -> str:
    if isinstance(result, RolloutFailure):
        return failed_state(result)
    if filtered == STALE:
        return STALE
    return f"filtered:{filtered}" if filtered else f"trained@{step}"


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _whole_lines(descriptor: int) -> int:
    """Size of the file up to its last newline."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - 4096)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_ledger(path: Path) -> Iterator[Record]:
    """All whole lines, oldest first. A last line without its newline is being written, or torn: it does not count."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield _decode(path, number, line)
    except OSError as error:
        raise LedgerError(f"cannot read the ledger {path}: {error.strerror}") from error


def _decode(path: Path, number: int, line: bytes) -> Record:
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LedgerError(f"line {number} of {path} is not a ledger record: {error}") from error
