"""`StalenessPolicy`: which groups may be dispatched, and which final groups form the next batch.

One object per `staleness_policy` owns both, because only together do they keep every sample within `max_staleness` (k).
Policies are frozen values with pure methods; `BatchAssembler` has the state. `make_policy` chooses, once per run.

The bound. Let `b` be the first batch that is not complete, `B` the `batch_size`, `R` the most rollouts that dispatched
groups outside complete batches can still bring, `U` the number of those groups, and `G = ceil(B / largest_group)` the
fewest groups that fill a batch. Batches that these groups can complete:

    batches <= min(R // B, U // G)

Each complete batch takes at least `B` of the `R` rollouts, and at least `G` of the `U` groups, and none is taken twice.
Neither bound implies the other. `B = 10`, three groups of 8: `R // B = 2`, `U // G = 1`; whole groups overshoot the
batch, so only one is complete. `B = 8`, groups of 4, 1, 1, 1: `R // B = 0`, `U // G = 2`; small groups fill nothing.
A group that fails or is filtered only lowers `R` and `U`. So a group that is dispatched now, behind them, ships at the
latest in `latest_step = b + min(R // B, U // G)`.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.values.group import STALE, ScoredGroup, staleness


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
    """What a `StalenessPolicy` looks at to admit the next group."""

    next_step: int
    """First batch that is not complete: `b`."""
    pending_rollouts: int
    """The most rollouts that dispatched groups outside complete batches can bring: `R`."""
    pending_groups: int
    """How many of those groups there are: `U`."""
    live_version: int
    free_slots: int
    """Rollouts that may be started now; negative after the limit was lowered."""


@dataclass(frozen=True, slots=True)
class StalenessPolicy(ABC):
    """Promise: no sample is staler than `max_staleness` when its batch is complete, and the run never locks up."""

    batch_size: int
    largest_group: int
    max_staleness: int
    max_steps: int

    def latest_step(self, outlook: Outlook) -> int:
        """`b + min(R // B, U // G)`: the last batch that a group dispatched now can ship in, in dispatch order."""
        groups_per_batch = math.ceil(self.batch_size / self.largest_group)
        by_rollouts = outlook.pending_rollouts // self.batch_size
        return outlook.next_step + min(by_rollouts, outlook.pending_groups // groups_per_batch)

    def verdict(self, outlook: Outlook, group_size: int) -> Verdict:
        """Whether a group of `group_size` rollouts may be dispatched now, or what it waits for."""
        if self.latest_step(outlook) > self.max_steps:
            return Verdict.ENOUGH
        if self.needed_version(outlook) > outlook.live_version:
            return Verdict.TOO_STALE
        return Verdict.NO_SLOT if group_size > outlook.free_slots else Verdict.ADMIT

    @abstractmethod
    def needed_version(self, outlook: Outlook) -> int:
        """The version that must be live for a group to be dispatched."""

    @abstractmethod
    def checked(self, scored: ScoredGroup, next_step: int) -> ScoredGroup:
        """The group that has become final while batch `next_step` is filled: filtered as `stale` if it is too old."""

    @abstractmethod
    def next_position(self, final: Mapping[int, ScoredGroup], head: int) -> int | None:
        """Which of the `final` groups goes into the batch next; `None`: none may.

        `final` is in the order of finishing. `head` is the first position that is dispatched and in no batch.
        """


@dataclass(frozen=True, slots=True)
class WaitPolicy(StalenessPolicy):
    """`wait`: batches are made of groups in dispatch order; the first one is waited for.

    So what a batch contains depends on the examples and their results alone, never on timing, and a run that was killed
    makes the very same batches again.

    Why the promise holds. A group is admitted while `v` is live. Engines serve `v` or later, so each of its tokens is
    of `v` or later (`envs/outcome.py` refuses others). It ships in batch `N <= latest_step`: nothing goes before it.
    Admission demands `latest_step - 1 - k <= v`. Hence `(N - 1) - v <= k`, however long the group waits in queues.
    No lock-up: if nothing more can come, `R < B`, so `latest_step = b`, and version `b - 1 - k` is made of batches that
    are already complete. Memory: rollouts that run, wait or lie untrained stay below `(k + 1) * B` plus less than a
    group per batch.

    Example: `B = 8`, groups of 4 (`G = 2`), `k = 1`, version 0 is live, nothing is dispatched, so `b = 1`.

    | dispatched | R  | U | latest_step   | needed version | verdict   |
    |------------|----|---|---------------|----------------|-----------|
    | -          | 0  | 0 | 1 + 0 = 1     | -1             | ADMIT 0   |
    | 0, 1       | 8  | 2 | 1 + 1 = 2     | 0              | ADMIT 2   |
    | 0, 1, 2, 3 | 16 | 4 | 1 + 2 = 3     | 1              | TOO_STALE |

    Groups finish in the order 1, 2, 0. Nothing ships before 0 is final; then batch 1 is `{0, 1}`, and 2 begins batch 2.
    If 0 has no signal, it is passed over: batch 1 is `{0 (filtered), 1, 2}`, and there is room for one more group.
    """

    def needed_version(self, outlook: Outlook) -> int:
        return self.latest_step(outlook) - 1 - self.max_staleness

    def checked(self, scored: ScoredGroup, next_step: int) -> ScoredGroup:
        return scored

    def next_position(self, final: Mapping[int, ScoredGroup], head: int) -> int | None:
        return head if head in final else None


@dataclass(frozen=True, slots=True)
class DropPolicy(StalenessPolicy):
    """`drop`: batches are made of groups in the order they finish; a group that finishes too late is thrown away.

    Why the promise holds. A final group goes into batch `b` at once, and is checked against `b`: `(b - 1) - oldest > k`
    filters it as `stale`. Admission only refuses what would be too old if it finished at once: `b - 1 - k > v`.
    `max_in_flight` bounds what runs. No lock-up: version `b - 1 - k` is made of batches that are already complete.

    Example: `B = 8`, groups of 4, `k = 1`. Version 0 is live and `b = 1`: groups 0 to 5 are dispatched, as slots allow.
    1 and 2 finish: batch 1 is `{1, 2}`. 4 and 3 finish: they have staleness `(2 - 1) - 0 = 1`, batch 2 is `{4, 3}`.
    Now `b = 3` needs version 1 to dispatch more. Group 0 finishes last: `(3 - 1) - 0 = 2 > 1`, so it is in batch 3 as
    `stale` and brings no rollouts.
    """

    def needed_version(self, outlook: Outlook) -> int:
        return outlook.next_step - 1 - self.max_staleness

    def checked(self, scored: ScoredGroup, next_step: int) -> ScoredGroup:
        age = max(staleness(next_step, [scored]), default=0)
        return dataclasses.replace(scored, filtered=STALE) if age > self.max_staleness else scored

    def next_position(self, final: Mapping[int, ScoredGroup], head: int) -> int | None:
        return next(iter(final), None)


def make_policy(config: OrchestratorConfig) -> StalenessPolicy:
    """The policy of `config.staleness_policy`, with the limits of the run."""
    policies: dict[str, type[StalenessPolicy]] = {"wait": WaitPolicy, "drop": DropPolicy}
    return policies[config.staleness_policy](
        batch_size=config.batch_size,
        largest_group=config.largest_group,
        max_staleness=config.max_staleness,
        max_steps=config.max_steps,
    )
