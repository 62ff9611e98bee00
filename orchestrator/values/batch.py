"""`AssembledBatch`: the groups of one batch; `staleness`: how old its samples are, the one definition."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.values.group import ScoredGroup
from orchestrator.values.rollout import Rollout
from transport.wire.ledger import CompletedPositions


@dataclass(frozen=True, slots=True)
class AssembledBatch:
    """Batch `step`: every group that the line passed since the cut before, filtered and stale ones included."""

    step: int
    groups: tuple[ScoredGroup, ...]
    done: CompletedPositions
    """What is in this batch and those before it: where a run that has this batch continues."""

    @property
    def trained(self) -> tuple[ScoredGroup, ...]:
        """The groups that ship."""
        return tuple(group for group in self.groups if group.num_trainable)

    @property
    def by_env(self) -> dict[str, list[ScoredGroup]]:
        """The groups of each environment, in their order."""
        found: dict[str, list[ScoredGroup]] = defaultdict(list)
        for group in self.groups:
            found[group.group.ticket.key.env_name].append(group)
        return dict(found)


def oldest_version(rollout: Rollout) -> int | None:
    """The version that the staleness of the rollout is counted from; `None` if no policy of ours sampled it."""
    return min((span.version for branch in rollout.branches for span in branch.versions), default=None)


def staleness(step: int, groups: Iterable[ScoredGroup]) -> list[int]:
    """`(step - 1) - oldest version` of every trained rollout that a policy of ours sampled."""
    versions = (oldest_version(rollout) for group in groups for _, rollout, _ in group.trainable)
    return [step - 1 - version for version in versions if version is not None]
