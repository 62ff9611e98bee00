"""Admission: may the next group be dispatched? A pure function.

Why no sample is ever staler than `max_staleness` (k) when its batch is cut:

1. A group is admitted while policy `v` is live. Every engine serves `v` or later, and versions only grow, so every
   token of the group is sampled by `v` or later (a rollout that is not is refused as `stale` when it comes back).
2. Batches are cut in dispatch order (`lineup.py`). Let `b` be the first batch that is not complete, `R` the most
   rollouts and `U` the number of groups ahead that can still bring rollouts. A complete batch takes at least
   `batch_size` rollouts, and so at least `ceil(batch_size / largest_group)` groups, from those ahead. So at most
   `min(R // batch_size, U // groups_per_batch)` batches are completed before the group's own: it ships at the latest
   in `latest = b + min(...)`.
3. Groups ahead of it can only turn out smaller than counted (failed, filtered), never larger, and nothing is inserted.
   So the group's batch `N` never moves past `latest`.
4. Admission demands `latest <= v + 1 + k`. Hence staleness = `(N - 1) - oldest <= (latest - 1) - v <= k`. It does not
   matter how long the group waits in queues: the bound is on its batch number, not on time.

Why it never locks up: if nothing can still come, `R < batch_size` (else the batch would be complete), so `latest = b`,
and `b <= v + 1 + k` holds once version `b - 1 - k` is live, which the trainer makes from batches that are already cut.

The same bound limits memory: rollouts that run, wait or lie untrained in complete batches stay below
`(k + 1) * batch_size` plus less than a group per batch.

That is `wait`. Under `drop` a group is refused only if it would be too old even if it finished at once,
`b > v + 1 + k`; what turns out too old is thrown away (`drop_lineup.py`), and `max_in_flight` bounds what runs.
"""

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.batches.assembler import BatchAssembler, Finish
from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.values.batch import staleness
from orchestrator.values.group import STALE, ScoredGroup
from transport.wire.ledger import CompletedPositions


class Verdict(StrEnum):
    """What the scheduler does next."""

    ADMIT = "admit"
    NO_SLOT = "a free rollout slot"
    """`max_in_flight` rollouts run."""
    TOO_STALE = "a newer policy version"
    """The group could ship in a batch that is too far ahead of the live policy."""
    ENOUGH = "the last batches"
    """What is dispatched may already fill every batch up to `max_steps`."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What admission looks at."""

    next_step: int
    """First batch that is not complete."""
    pending_rollouts: int
    """The most rollouts that dispatched groups outside complete batches can bring."""
    pending_groups: int
    """How many of those groups there are."""
    live_version: int
    in_flight: int
    """Rollouts that run."""


@dataclass(frozen=True, slots=True)
class AdmissionRule:
    """The limits of one run."""

    batch_size: int
    largest_group: int
    max_staleness: int
    max_in_flight: int
    max_steps: int
    drops_stale: bool = False
    """Groups that come too late are thrown away, so that one is started as soon as it could be in time."""

    def latest_step(self, outlook: Outlook) -> int:
        """The last batch that a group dispatched now can end up in."""
        groups_per_batch = math.ceil(self.batch_size / self.largest_group)
        by_rollouts = outlook.pending_rollouts // self.batch_size
        return outlook.next_step + min(by_rollouts, outlook.pending_groups // groups_per_batch)

    def needed_version(self, outlook: Outlook) -> int:
        """The version that must be live for a group to be dispatched."""
        step = outlook.next_step if self.drops_stale else self.latest_step(outlook)
        return step - 1 - self.max_staleness

    def verdict(self, outlook: Outlook, group_size: int) -> Verdict:
        """Whether a group of `group_size` rollouts may be dispatched now, or what it waits for."""
        if self.latest_step(outlook) > self.max_steps:
            return Verdict.ENOUGH
        if self.needed_version(outlook) > outlook.live_version:
            return Verdict.TOO_STALE
        if outlook.in_flight + group_size > self.max_in_flight:
            return Verdict.NO_SLOT
        return Verdict.ADMIT


class DropAssembler(BatchAssembler):
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


def make_assembler(
    config: OrchestratorConfig, next_step: int, done: CompletedPositions, finish: Finish
) -> BatchAssembler:
    """The line of `config.staleness_policy`."""
    match config.staleness_policy:
        case "wait":
            return BatchAssembler(config.batch_size, next_step, done, finish)
        case "drop":
            return DropAssembler(config.batch_size, next_step, done, finish, max_staleness=config.max_staleness)
