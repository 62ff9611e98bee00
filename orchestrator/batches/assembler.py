"""`Lineup`: dispatched groups, cut into batches. Here in dispatch order, the policy `wait`.

Batches are made of groups in the order they were dispatched, however they finish: the head of the line is waited for.
So what a batch contains depends on the examples and their results alone, never on timing, and a run that was killed
and restarted cuts the very same batches. A group that brings nothing (filtered, dropped) is passed over and the next
ones move forward: that is the backfill, and it can only make a group ship earlier.

`drop_lineup.py` takes groups in the order they finish instead.
"""

from collections import deque
from collections.abc import Callable, Sequence

from orchestrator.errors import InvariantError
from orchestrator.values.batch import AssembledBatch
from orchestrator.values.group import ScoredGroup, Ticket
from transport.wire.ledger import CompletedPositions

Finish = Callable[[Sequence[ScoredGroup]], tuple[ScoredGroup, ...]]


class BatchAssembler:
    """Pure bookkeeping. `cuts` holds batches that are complete and not yet taken; `finish` sees the groups of each
    once, when it is complete, and gives them back in the same order.

    Invariant, for every order of taking: each position that was dispatched is in exactly one cut, or waits in the line.
    """

    def __init__(self, batch_size: int, next_step: int, done: CompletedPositions, finish: Finish = tuple) -> None:
        self.next_step = next_step
        """The first batch that is not complete yet."""
        self.cuts: deque[AssembledBatch] = deque()
        self.pending_rollouts = 0
        """The most rollouts that groups outside any complete batch can still bring."""
        self.pending_groups = 0
        """Groups outside any complete batch that can still bring rollouts."""
        self._batch_size = batch_size
        self._finish = finish
        self._begin = done
        self._done = done
        self._tail = done.next_open(0)
        self._head = self._tail
        self._open: dict[int, Ticket] = {}
        self._settled: dict[int, ScoredGroup] = {}
        self._forming: list[ScoredGroup] = []
        self._forming_rollouts = 0

    def __len__(self) -> int:
        """Groups that were dispatched and are in no complete batch."""
        return len(self._open) + len(self._settled) + len(self._forming)

    @property
    def tail(self) -> int:
        """Position that is dispatched next."""
        return self._tail

    def dispatch(self, ticket: Ticket) -> None:
        """A group joins the end of the line."""
        if ticket.seq != self._tail:
            raise InvariantError(f"group {ticket.key.id} has position {ticket.seq}, expected {self._tail}")
        self._tail = self._begin.next_open(self._tail + 1)
        self._open[ticket.seq] = ticket
        self.pending_rollouts += ticket.size
        self.pending_groups += 1

    def settle(self, scored: ScoredGroup) -> list[ScoredGroup]:
        """A group is final. Returns the groups that the line passes because of it, in the order of passing."""
        ticket = scored.group.ticket
        if self._open.pop(ticket.seq, None) is None:
            raise InvariantError(f"group {ticket.key.id} at position {ticket.seq} was settled but is not awaited")
        scored = self._judge(scored)
        self.pending_rollouts += scored.num_trainable - ticket.size
        self.pending_groups -= scored.num_trainable == 0
        return self._take(scored)

    def _judge(self, scored: ScoredGroup) -> ScoredGroup:
        """The group as the policy sees it: it may have become too old."""
        return scored

    def _take(self, scored: ScoredGroup) -> list[ScoredGroup]:
        """Put the group where it belongs, and cut what is complete."""
        self._settled[scored.group.ticket.seq] = scored
        passed = []
        while self._head in self._settled:
            scored = self._settled.pop(self._head)
            self._head = self._begin.next_open(self._head + 1)
            passed.append(scored)
            self._form(scored)
        return passed

    def _form(self, scored: ScoredGroup) -> None:
        """The group goes into the next batch, which is cut as soon as it is full."""
        self._forming.append(scored)
        self._forming_rollouts += scored.num_trainable
        if self._forming_rollouts >= self._batch_size:
            self._cut()

    def _cut(self) -> None:
        self._done = self._done.add(group.group.ticket.seq for group in self._forming)
        cut = AssembledBatch(self.next_step, self._finish(self._forming), self._done)
        self.cuts.append(cut)
        self.next_step += 1
        self.pending_rollouts -= self._forming_rollouts
        self.pending_groups -= len(cut.trained)
        self._forming, self._forming_rollouts = [], 0
