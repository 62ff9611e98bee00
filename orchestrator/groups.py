"""`GroupBuffer`: collects the rollouts of a group until every one that was dispatched is accounted for.

A group is found by its key `(env_name, example_id, attempt)`, never by position or stride. It is final the moment its
last member comes back, failed or not. A member whose try failed and is run again has not come back; the failed try is
kept beside the results. What a failure costs depends on the scoring and on the environment's policy (`drop_reason`).

Invariant: `opened = open + final`, and each member of an open group is recorded at most once.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.errors import InvariantError
from orchestrator.rollout import Failure, Rollout

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
    results: tuple[Rollout | Failure, ...]
    failed_tries: tuple[tuple[int, Failure], ...] = ()
    """Tries that failed and were made again, with the index of their rollout, in the order they were seen."""

    @property
    def survivors(self) -> tuple[tuple[int, Rollout], ...]:
        """Finished rollouts with their index."""
        return tuple((index, result) for index, result in enumerate(self.results) if isinstance(result, Rollout))

    @property
    def failures(self) -> tuple[tuple[int, Failure], ...]:
        """Failed rollouts with their index."""
        return tuple((index, result) for index, result in enumerate(self.results) if isinstance(result, Failure))

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


@dataclass(slots=True)
class _OpenGroup:
    ticket: Ticket
    results: dict[int, Rollout | Failure] = field(default_factory=dict)
    failed_tries: list[tuple[int, Failure]] = field(default_factory=list)


class GroupBuffer:
    """Open groups by key."""

    def __init__(self) -> None:
        self._open: dict[GroupKey, _OpenGroup] = {}

    def open(self, ticket: Ticket) -> None:
        """A group was dispatched."""
        if ticket.key in self._open:
            raise InvariantError(f"group {ticket.key.id} was dispatched while it is still open")
        self._open[ticket.key] = _OpenGroup(ticket)

    def retry(self, key: GroupKey, index: int, failure: Failure) -> None:
        """A try of one member failed and is made again: the member is still awaited."""
        self._awaiting(key, index).failed_tries.append((index, failure))

    def record(self, key: GroupKey, index: int, result: Rollout | Failure) -> FinalGroup | None:
        """Account for one member; the final group if it was the last."""
        group = self._awaiting(key, index)
        group.results[index] = result
        if len(group.results) < group.ticket.size:
            return None
        del self._open[key]
        results = tuple(group.results[member] for member in range(group.ticket.size))
        return FinalGroup(group.ticket, results, tuple(group.failed_tries))

    def _awaiting(self, key: GroupKey, index: int) -> _OpenGroup:
        group = self._open.get(key)
        if group is None or not 0 <= index < group.ticket.size or index in group.results:
            raise InvariantError(f"rollout {key.id}#{index} came back but is not awaited")
        return group
