"""`GroupBuffer`: collects the rollouts of a group until every one that was dispatched is accounted for.

A group is found by its key `(env_name, example_id, attempt)`, never by position or stride. It is final the moment its
last member comes back, failed or not; nobody waits for a replacement. What a failure costs depends on the scoring:

- individually scored: the failed rollout is scrapped alone, the survivors ship;
- jointly scored: any failure drops the whole group: the surviving scores were computed against the missing ones.

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

    @property
    def survivors(self) -> tuple[tuple[int, Rollout], ...]:
        """Finished rollouts with their index."""
        return tuple((index, result) for index, result in enumerate(self.results) if isinstance(result, Rollout))

    @property
    def failures(self) -> tuple[tuple[int, Failure], ...]:
        """Failed rollouts with their index."""
        return tuple((index, result) for index, result in enumerate(self.results) if isinstance(result, Failure))

    @property
    def drop_reason(self) -> str | None:
        """Why nothing of this group can be trained; `None` if the survivors can."""
        if len(self.survivors) == 0:
            return NO_SURVIVORS
        if self.ticket.scores_jointly and self.failures:
            return JOINT_FAILURE
        return None


@dataclass(slots=True)
class _OpenGroup:
    ticket: Ticket
    results: dict[int, Rollout | Failure] = field(default_factory=dict)


class GroupBuffer:
    """Open groups by key."""

    def __init__(self) -> None:
        self._open: dict[GroupKey, _OpenGroup] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, ticket: Ticket) -> None:
        """A group was dispatched."""
        if ticket.key in self._open:
            raise InvariantError(f"group {ticket.key.id} was dispatched while it is still open")
        self._open[ticket.key] = _OpenGroup(ticket)

    def record(self, key: GroupKey, index: int, result: Rollout | Failure) -> FinalGroup | None:
        """Account for one member; the final group if it was the last."""
        group = self._open.get(key)
        if group is None or not 0 <= index < group.ticket.size or index in group.results:
            raise InvariantError(f"rollout {key.id}#{index} came back but is not awaited")
        group.results[index] = result
        if len(group.results) < group.ticket.size:
            return None
        del self._open[key]
        return FinalGroup(group.ticket, tuple(group.results[member] for member in range(group.ticket.size)))
