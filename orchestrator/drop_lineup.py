"""`DropLineup`: batches in completion order; what comes too late is thrown away. The policy `drop`.

A group joins the batch that is being filled when it finishes, and the number of that batch is known at that moment, so
its staleness is, too: a group that is older than `max_staleness` by then is stale and passed over. Nothing waits, so
the trainer hardly does; but it is the long rollouts that come late, and they are trained less often than they occur.

Why it never locks up: while nothing fresh comes, no batch is cut, so no version is made either, and what is dispatched
under the live version is fresh.
"""

import dataclasses

from orchestrator.filters import STALE, ScoredGroup
from orchestrator.lineup import Finish, Lineup
from orchestrator.metrics import staleness
from transport.wire.ledger import CompletedPositions


class DropLineup(Lineup):
    """A stale group is in the cut like a filtered one: `filtered` says `stale`."""

    def __init__(
        self, batch_size: int, next_step: int, done: CompletedPositions, finish: Finish = tuple, *, max_staleness: int
    ) -> None:
        super().__init__(batch_size, next_step, done, finish)
        self._max_staleness = max_staleness

    def _judge(self, scored: ScoredGroup) -> ScoredGroup:
        age = max(staleness(self.next_step, [scored]), default=0)
        return dataclasses.replace(scored, filtered=STALE) if age > self._max_staleness else scored

    def _take(self, scored: ScoredGroup) -> list[ScoredGroup]:
        self._form(scored)
        return [scored]
