"""The lines of the ledger, and the arithmetic on them: `dispatched = sum of terminal states`.

A group is dispatched as a whole, and the fates of its rollouts are written together, when its batch is cut. A try that
failed and is made again is a rollout of its own: it has its terminal state at once, and one more was dispatched.
`Cancelled` takes back everything that is not in a durable batch: rollouts that ran when the process ended, and rollouts
of a batch that was written down here but did not become durable (the ledger is written first). They are generated
again, under the same position, and counted as dispatched again.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

PositionSpan = tuple[int, int]
"""Positions `[first, end)`."""


@dataclass(frozen=True, slots=True)
class CompletedPositions:
    """Positions of the example order that are in durable batches: all below `cursor`, which itself is not, and
    `beyond`.

    Batches in dispatch order leave no holes: this is one number. Batches in completion order pass groups that still
    run: positions beyond the cursor are done while some before them are not. They are kept as spans, of which there
    are never more than groups that are being waited for.
    """

    cursor: int = 0
    beyond: tuple[PositionSpan, ...] = ()
    """Sorted; no two touch."""

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, int) and self.next_open(seq) != seq

    def next_open(self, seq: int) -> int:
        """The first position from `seq` on that is not done."""
        seq = max(seq, self.cursor)
        index = bisect_right(self.beyond, seq, key=lambda span: span[0]) - 1
        return max(seq, self.beyond[index][1]) if index >= 0 else seq

    def add(self, seqs: Iterable[int]) -> "CompletedPositions":
        """Mark these positions as done."""
        merged: list[PositionSpan] = [(0, self.cursor)]
        for first, end in sorted([*self.beyond, *((seq, seq + 1) for seq in seqs)]):
            last_first, last_end = merged[-1]
            if first <= last_end:
                merged[-1] = (last_first, max(end, last_end))
            else:
                merged.append((first, end))
        return CompletedPositions(merged[0][1], tuple(merged[1:]))


IN_FLIGHT = "in_flight"


class CancelReason(StrEnum):
    """Why rollouts were not used."""

    RESTART = "restart"
    """The process died; they are generated again."""
    SHUTDOWN = "shutdown"
    """The process was asked to stop; they are generated again when the run goes on."""
    END_OF_RUN = "end_of_run"
    """The last batch is cut."""


class Dispatched(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="dispatched"):
    """`size` rollouts of `group` were started, at position `seq`."""

    seq: int
    group: str
    size: int


class Settled(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="settled"):
    """The terminal state of each rollout of the group at `seq`, by index."""

    seq: int
    states: tuple[str, ...]


class Retried(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="retried"):
    """A try of rollout `index` of the group at `seq` ended in `state`, and the rollout was started again."""

    seq: int
    index: int
    state: str


class Cancelled(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="cancelled", omit_defaults=True
):
    """All groups that are not cancelled yet, at positions >= `cursor` but for those in `beyond`, which are done."""

    cursor: int
    reason: CancelReason
    beyond: tuple[PositionSpan, ...] = ()


Record = Dispatched | Retried | Settled | Cancelled


@dataclass(slots=True)
class Tally:
    """What a ledger says. `problems` are lines that contradict each other."""

    num_dispatched: int = 0
    states: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def num_terminal(self) -> int:
        """Sum over all states, `in_flight` included."""
        return self.states.total()

    @property
    def balances(self) -> bool:
        """Every dispatched rollout has exactly one state."""
        return self.num_dispatched == self.num_terminal and not self.problems


def tally(records: Iterable[Record]) -> Tally:
    """Add up a ledger. Groups without a terminal state at the end are `in_flight`."""
    result = Tally()
    open_sizes: dict[int, int] = {}
    settled: dict[int, tuple[str, ...]] = {}
    for record in records:
        match record:
            case Dispatched(seq=seq, size=size):
                if seq in open_sizes or seq in settled:
                    result.problems.append(f"position {seq} was dispatched twice")
                result.num_dispatched += size
                open_sizes[seq] = size
            case Retried(seq=seq, index=index, state=state):
                if not 0 <= index < open_sizes.get(seq, 0):
                    result.problems.append(f"rollout {index} at position {seq} was retried but was not running")
                result.num_dispatched += 1  # the new try; the old one has ended, whatever becomes of the group
                result.states[state] += 1
            case Settled(seq=seq, states=states):
                if open_sizes.pop(seq, None) != len(states):
                    result.problems.append(
                        f"position {seq} was settled with {len(states)} states but not dispatched so"
                    )
                settled[seq] = states
            case Cancelled(cursor=cursor, beyond=beyond):
                _cancel(result, CompletedPositions(cursor, beyond), open_sizes, settled)
    for states in settled.values():
        result.states.update(states)
    if open_sizes:
        result.states[IN_FLIGHT] += sum(open_sizes.values())
    return result


def _cancel(
    result: Tally, done: CompletedPositions, open_sizes: dict[int, int], settled: dict[int, tuple[str, ...]]
) -> None:
    void = [seq for seq in open_sizes if seq not in done]
    taken_back = [seq for seq in settled if seq >= done.cursor and seq not in done]
    num_cancelled = sum(open_sizes.pop(seq) for seq in void) + sum(len(settled.pop(seq)) for seq in taken_back)
    if num_cancelled:
        result.states["cancelled"] += num_cancelled
