"""`BatchAssembler`: dispatched groups, assembled into batches in the order that the staleness policy gives.

A group that brings nothing (filtered, dropped, stale) is passed over, and later ones move forward: that is the
backfill, and it can only make a group ship earlier.
"""

from collections import deque
from collections.abc import Callable, Sequence

from orchestrator.batches.staleness_policy import Outlook, StalenessPolicy
from orchestrator.errors import InvariantError
from orchestrator.values.batch import AssembledBatch
from orchestrator.values.group import ScoredGroup, Ticket
from transport.wire.ledger import CompletedPositions

Finish = Callable[[Sequence[ScoredGroup]], tuple[ScoredGroup, ...]]


class BatchAssembler:
    """Pure bookkeeping. `complete` holds batches that are complete and not yet shipped; `finish` sees the groups of
    each once, when it is complete, and gives them back in the same order.

    Invariant, for every order of finishing: each position that was dispatched is in exactly one complete batch, or in
    none yet.
    """

    def __init__(
        self, policy: StalenessPolicy, next_step: int, done: CompletedPositions, finish: Finish = tuple
    ) -> None:
        self.policy = policy
        self.next_step = next_step
        """The first batch that is not complete yet."""
        self.complete: deque[AssembledBatch] = deque()
        self.pending_rollouts = 0
        """The most rollouts that groups outside any complete batch can still bring."""
        self.pending_groups = 0
        """Groups outside any complete batch that can still bring rollouts."""
        self._finish = finish
        self._begin = done
        self._done = done
        self._tail = done.next_open(0)
        self._head = self._tail
        self._open: dict[int, Ticket] = {}
        self._final: dict[int, ScoredGroup] = {}
        self._taken: list[ScoredGroup] = []
        self._taken_rollouts = 0

    def __len__(self) -> int:
        """Groups that were dispatched and are in no complete batch."""
        return len(self._open) + len(self._final) + len(self._taken)

    @property
    def tail(self) -> int:
        """Position that is dispatched next."""
        return self._tail

    def outlook(self, live_version: int, free_slots: int) -> Outlook:
        """What `policy` admits the next group by."""
        return Outlook(self.next_step, self.pending_rollouts, self.pending_groups, live_version, free_slots)

    def dispatch(self, ticket: Ticket) -> None:
        """A group was dispatched; it must be the one at `tail`."""
        if ticket.seq != self._tail:
            raise InvariantError(f"group {ticket.key.id} has position {ticket.seq}, expected {self._tail}")
        self._tail = self._begin.next_open(self._tail + 1)
        self._open[ticket.seq] = ticket
        self.pending_rollouts += ticket.size
        self.pending_groups += 1

    def add_final(self, scored: ScoredGroup) -> list[ScoredGroup]:
        """A group is final. Returns the groups that are taken into batches because of it, in their order."""
        ticket = self._open.pop(scored.seq, None)
        if ticket is None:
            raise InvariantError(f"group {scored.id} at position {scored.seq} is final but is not awaited")
        scored = self.policy.checked(scored, self.next_step)
        self.pending_rollouts += scored.num_trainable - ticket.size
        self.pending_groups -= scored.num_trainable == 0
        self._final[scored.seq] = scored
        taken = []
        while (seq := self.policy.next_position(self._final, self._head)) is not None:
            taken.append(self._final.pop(seq))
            self._advance_head()
            self._take(taken[-1])
        return taken

    def _advance_head(self) -> None:
        while self._head != self._tail and self._head not in self._open and self._head not in self._final:
            self._head = self._begin.next_open(self._head + 1)

    def _take(self, scored: ScoredGroup) -> None:
        """The group goes into batch `next_step`, which is complete as soon as it is full."""
        self._taken.append(scored)
        self._taken_rollouts += scored.num_trainable
        if self._taken_rollouts >= self.policy.batch_size:
            self._complete_batch()

    def _complete_batch(self) -> None:
        self._done = self._done.add(group.seq for group in self._taken)
        batch = AssembledBatch(self.next_step, self._finish(self._taken), self._done)
        self.complete.append(batch)
        self.next_step += 1
        self.pending_rollouts -= self._taken_rollouts
        self.pending_groups -= len(batch.trained)
        self._taken, self._taken_rollouts = [], 0
