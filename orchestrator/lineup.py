"""`Lineup`: groups in dispatch order, cut into batches.

Batches are made of groups in the order they were dispatched, however they finish: the head of the line is waited for.
So what a batch contains depends on the examples and their results alone, never on timing, and a run that was killed
and restarted cuts the very same batches. A group that brings nothing (filtered, dropped) is passed over and the next
ones move forward: that is the backfill, and it can only make a group ship earlier.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.errors import InvariantError
from orchestrator.filters import ScoredGroup
from orchestrator.groups import Ticket

Finish = Callable[[Sequence[ScoredGroup]], tuple[ScoredGroup, ...]]


@dataclass(frozen=True, slots=True)
class Cut:
    """Batch `step`: everything the line passed since the cut before, filtered groups included."""

    step: int
    groups: tuple[ScoredGroup, ...]
    cursor: int
    """Position after the last group: where a run that has this batch continues."""

    @property
    def trained(self) -> tuple[ScoredGroup, ...]:
        """The groups that ship."""
        return tuple(group for group in self.groups if group.num_trainable)


class Lineup:
    """Pure bookkeeping. `cuts` holds batches that are complete and not yet taken; `finish` sees the groups of each
    once, when it is complete, and gives them back in the same order."""

    def __init__(self, batch_size: int, next_step: int, cursor: int, finish: Finish = tuple) -> None:
        self.next_step = next_step
        """The first batch that is not complete yet."""
        self.cuts: deque[Cut] = deque()
        self.pending_rollouts = 0
        """The most rollouts that groups outside any complete batch can still bring."""
        self.pending_groups = 0
        """Groups outside any complete batch that can still bring rollouts."""
        self._batch_size = batch_size
        self._finish = finish
        self._head = cursor
        self._tail = cursor
        self._settled: dict[int, ScoredGroup] = {}
        self._forming: list[ScoredGroup] = []
        self._forming_rollouts = 0

    def __len__(self) -> int:
        """Groups that were dispatched and are in no complete batch."""
        return self._tail - self._head + len(self._forming)

    @property
    def head(self) -> int:
        """Position that the line waits for."""
        return self._head

    @property
    def tail(self) -> int:
        """Position that is dispatched next."""
        return self._tail

    def dispatch(self, ticket: Ticket) -> None:
        """A group joins the end of the line."""
        if ticket.seq != self._tail:
            raise InvariantError(f"group {ticket.key.id} has position {ticket.seq}, expected {self._tail}")
        self._tail += 1
        self.pending_rollouts += ticket.size
        self.pending_groups += 1

    def settle(self, scored: ScoredGroup) -> list[ScoredGroup]:
        """A group is final. Returns the groups that the line passes because of it, in dispatch order."""
        ticket = scored.group.ticket
        if not self._head <= ticket.seq < self._tail or ticket.seq in self._settled:
            raise InvariantError(f"group {ticket.key.id} at position {ticket.seq} was settled but is not awaited")
        self._settled[ticket.seq] = scored
        self.pending_rollouts += scored.num_trainable - ticket.size
        self.pending_groups -= scored.num_trainable == 0
        return self._advance()

    def _advance(self) -> list[ScoredGroup]:
        passed = []
        while self._head in self._settled:
            scored = self._settled.pop(self._head)
            self._head += 1
            passed.append(scored)
            self._forming.append(scored)
            self._forming_rollouts += scored.num_trainable
            if self._forming_rollouts >= self._batch_size:
                self._cut()
        return passed

    def _cut(self) -> None:
        cut = Cut(self.next_step, self._finish(self._forming), self._head)
        self.cuts.append(cut)
        self.next_step += 1
        self.pending_rollouts -= self._forming_rollouts
        self.pending_groups -= len(cut.trained)
        self._forming, self._forming_rollouts = [], 0
