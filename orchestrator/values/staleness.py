"""Staleness: how many policy versions a sample is behind the one that its batch trains. The one definition.

Batch `N` trains version `N - 1`. A rollout whose oldest token was sampled by version `v` has staleness `(N - 1) - v` in
it. `orchestrator/batches/staleness_policy.py` keeps it within `max_staleness`; `check_staleness` verifies that.
"""

from collections.abc import Iterable

from orchestrator.errors import InvariantError
from orchestrator.values.batch import AssembledBatch
from orchestrator.values.group import ScoredGroup
from orchestrator.values.rollout import Rollout


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
