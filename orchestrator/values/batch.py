"""`AssembledBatch`: the groups of one batch."""

from collections import defaultdict
from dataclasses import dataclass

from orchestrator.values.group import ScoredGroup
from transport.wire.ledger import CompletedPositions


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
