"""A group of rollouts from draw to batch: `GroupKey`, `Ticket`, `FinalGroup`, `ScoredGroup`, `AssembledBatch`.

Staleness is how many policy versions a sample is behind the one that its batch trains; the one definition is here.
Batch `N` trains version `N - 1`. A rollout whose oldest token was sampled by version `v` has staleness `(N - 1) - v` in
it. `orchestrator/batches/staleness_policy.py` keeps it within `max_staleness`; `check_staleness` verifies that.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.errors import InvariantError
from orchestrator.values.rollout import PLAIN_RL, Rollout, RolloutFailure, TokenWeights
from transport.wire.ledger import CompletedPositions

JOINT_FAILURE = "joint_failure"
"""A member of a jointly scored group failed."""
NO_SURVIVORS = "no_survivors"
"""Every member failed."""
PARTIAL_GROUP = "partial_group"
"""A member failed, and the environment's policy is `drop_group`."""
TOO_FEW_SURVIVORS = "too_few_survivors"
"""Fewer members than `min_group_size` came back."""
LOST_GROUP = frozenset({JOINT_FAILURE, NO_SURVIVORS, PARTIAL_GROUP, TOO_FEW_SURVIVORS})
"""What `drop_reason` says: failures cost the group."""


class GroupKey(NamedTuple):
    """What a group is: one visit of one example."""

    env_name: str
    example_id: str
    attempt: int

    @property
    def id(self) -> str:
        """The name of the group on the wire and in files."""
        return f"{self.env_name}/{self.example_id}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class Ticket:
    """A dispatched group: `seq` is its place in the dispatch order, `version` the policy that was live then."""

    key: GroupKey
    seq: int
    size: int
    scores_jointly: bool
    version: int


@dataclass(frozen=True, slots=True)
class FinalGroup:
    """Every dispatched rollout is in `results`, at its index."""

    ticket: Ticket
    results: tuple[Rollout | RolloutFailure, ...]
    failed_tries: tuple[tuple[int, RolloutFailure], ...] = ()
    """Tries that failed and were made again, with the index of their rollout, in the order they were seen."""

    @property
    def survivors(self) -> tuple[tuple[int, Rollout], ...]:
        """Finished rollouts with their index."""
        return tuple((index, result) for index, result in enumerate(self.results) if isinstance(result, Rollout))

    @property
    def failures(self) -> tuple[tuple[int, RolloutFailure], ...]:
        """Failed rollouts with their index."""
        return tuple((index, result) for index, result in enumerate(self.results) if isinstance(result, RolloutFailure))

    @property
    def num_dispatched(self) -> int:
        """Rollouts that were started, failed tries included."""
        return self.ticket.size + len(self.failed_tries)

    def drop_reason(self, *, min_survivors: int = 1, drops_partial: bool = False) -> str | None:
        """Why nothing of this group can be trained; `None` if the survivors can.

        Scores of a jointly scored group were computed against the missing ones: any failure drops it.
        """
        if not self.survivors:
            return NO_SURVIVORS
        if self.failures and self.ticket.scores_jointly:
            return JOINT_FAILURE
        if self.failures and drops_partial:
            return PARTIAL_GROUP
        return TOO_FEW_SURVIVORS if len(self.survivors) < min_survivors else None


ZERO_SIGNAL = "zero_signal"
"""Every advantage of the group is 0: it would add nothing to the gradient."""


STALE = "stale"
"""The group finished too late for the batch that was being filled (`staleness_policy = "drop"`)."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A final group, the advantages of its survivors, and why it will not be trained, if so."""

    group: FinalGroup
    advantages: tuple[float, ...]
    """One per survivor, in their order; empty if the group was dropped."""
    filtered: str | None
    weights: TokenWeights = PLAIN_RL
    """How much its tokens count in each part of the loss."""

    @property
    def id(self) -> str:
        """The name of the group on the wire and in files."""
        return self.group.ticket.key.id

    @property
    def env_name(self) -> str:
        """The environment that its example is of."""
        return self.group.ticket.key.env_name

    @property
    def seq(self) -> int:
        """Its place in the dispatch order."""
        return self.group.ticket.seq

    @property
    def version(self) -> int:
        """The policy version that was live when it was dispatched."""
        return self.group.ticket.version

    @property
    def is_lost(self) -> bool:
        """Whether failures cost the whole group."""
        return self.filtered in LOST_GROUP

    @property
    def num_trainable(self) -> int:
        """Rollouts that this group brings to a batch."""
        return 0 if self.filtered else len(self.advantages)

    @property
    def trainable(self) -> tuple[tuple[int, Rollout, float], ...]:
        """`(index, rollout, advantage)` of everything that is trained."""
        if self.filtered:
            return ()
        pairs = zip(self.group.survivors, self.advantages, strict=True)
        return tuple((index, rollout, advantage) for (index, rollout), advantage in pairs)


@dataclass(frozen=True, slots=True)
class AssembledBatch:
    """Batch `step`: every group that was taken since the batch before was complete, filtered and stale ones
    included."""

    step: int
    groups: tuple[ScoredGroup, ...]
    done: CompletedPositions
    """What is in this batch and those before it: where a run that has this batch continues."""

    @property
    def trained(self) -> tuple[ScoredGroup, ...]:
        """The groups whose samples are in the batch."""
        return tuple(group for group in self.groups if group.num_trainable)

    @property
    def by_env(self) -> dict[str, list[ScoredGroup]]:
        """The groups of each environment, in their order."""
        found: dict[str, list[ScoredGroup]] = defaultdict(list)
        for group in self.groups:
            found[group.env_name].append(group)
        return dict(found)


def oldest_version(rollout: Rollout) -> int | None:
    """The version that the staleness of the rollout is counted from; `None` if no policy of ours sampled it."""
    return min((span.version for branch in rollout.branches for span in branch.versions), default=None)


def staleness(step: int, groups: Iterable[ScoredGroup]) -> list[int]:
    """`(step - 1) - oldest version` of every trained rollout that a policy of ours sampled."""
    versions = (oldest_version(rollout) for group in groups for _, rollout, _ in group.trainable)
    return [step - 1 - version for version in versions if version is not None]


def check_staleness(batch: AssembledBatch, max_staleness: int) -> None:
    """Raise `InvariantError` if a sample of `batch` is staler than `max_staleness`."""
    worst = max(staleness(batch.step, batch.groups), default=0)
    if worst > max_staleness:
        raise InvariantError(
            f"batch {batch.step} holds a sample of staleness {worst}, above max_staleness {max_staleness}"
        )
