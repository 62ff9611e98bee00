"""A group of rollouts as it goes on: `GroupKey`, `Ticket` (dispatched), `FinalGroup`, `ScoredGroup`."""

from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.values.rollout import Rollout, RolloutFailure
from orchestrator.values.token_weights import PLAIN_RL, TokenWeights

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
