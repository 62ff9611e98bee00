"""The orchestrator's own state: what of the example order is in batches. One small file, replaced by rename.

The outbox knows which batches are durable; this file says where the next one begins. A batch is written in this order:

    1. ledger   the fates of the batch's groups, fsynced; with a curriculum, a line of the history
    2. state    {step N, done before it: c, done with it: c'}
    3. outbox   batch N, by rename            <- the instant at which batch N exists
    4. announce

Kill -9 before 3: the outbox still expects N. The state (older, or the one of 2) says where N begins: `c`. Batch N is
made again; the first one was never announced. The lines of it in ledger and history are taken back at the restart.
Kill -9 after 3: the outbox expects N + 1, and the state says that N + 1 begins at `c'`. N is never cut again.
`c` is a cursor, and where batches are not in dispatch order also the positions beyond it that are done: all others, of
groups that ran when the process died, are dispatched again (`CompletedPositions`).
The state must be written before the batch, and hold both positions: written after, a kill between the two would leave a
durable batch and no knowledge of where it ended, and its examples would be trained twice.

Final groups that are in no batch yet are not kept: they are generated again from their seeds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from orchestrator.data.examples import EnvShare
from orchestrator.errors import StateMismatchError
from transport.durable import atomic_write
from transport.wire.ledger import CompletedPositions, PositionSpan

STATE_NAME = "orchestrator.json"


class BatchState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Before batch `step`, the positions below `begin` and in `begin_beyond` were done; with it, those below `end` and
    in `end_beyond` are. They are positions of the order that `order` describes."""

    run_id: str
    order: str
    step: int
    begin: int
    end: int
    begin_beyond: tuple[PositionSpan, ...] = ()
    end_beyond: tuple[PositionSpan, ...] = ()

    @classmethod
    def of(cls, run_id: str, order: str, step: int, before: CompletedPositions, after: CompletedPositions) -> Self:
        return cls(
            run_id=run_id,
            order=order,
            step=step,
            begin=before.cursor,
            end=after.cursor,
            begin_beyond=before.beyond,
            end_beyond=after.beyond,
        )


def describe_order(seed: int, shares: Sequence[EnvShare]) -> str:
    """Everything the example order depends on: a cursor has a meaning only together with it."""
    return f"seed {seed}, envs {', '.join(map(_describe, shares))}"


def _describe(share: EnvShare) -> str:
    rounds = f", curriculum in rounds of {share.refresh_groups}" if share.refresh_groups else ""
    return f"{share.name} ({share.num_examples} examples, ratio {share.ratio:g}{rounds})"


def load_state(path: Path) -> BatchState | None:
    """What was saved last; `None` before the first."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=BatchState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise StateMismatchError(f"cannot read the orchestrator's state {path}: {error}") from error


def save_state(path: Path, state: BatchState) -> None:
    """Replace the state, durably. Raises `OSError`."""
    atomic_write(path, msgspec.json.encode(state))


def resume(state: BatchState | None, next_step: int, *, run_id: str, order: str) -> CompletedPositions:
    """What is done before batch `next_step`, which the outbox expects. Raises `StateMismatchError`."""
    if state is None and next_step == 1:
        return CompletedPositions()
    if state is None:
        raise StateMismatchError(
            f"run {run_id!r} has batches up to {next_step - 1} but no state; choose another --run.name"
        )
    if (state.run_id, state.order) != (run_id, order):
        raise StateMismatchError(
            f"run {state.run_id!r} was started with {state.order}; now it has {order}. Restore the settings or choose "
            "another --run.name"
        )
    if next_step not in (state.step, state.step + 1):
        raise StateMismatchError(
            f"the outbox of run {run_id!r} expects batch {next_step}, its state is about batch {state.step}: the run "
            "directory is a mix of two runs; choose another --run.name"
        )
    if next_step == state.step:
        return CompletedPositions(state.begin, state.begin_beyond)
    return CompletedPositions(state.end, state.end_beyond)
