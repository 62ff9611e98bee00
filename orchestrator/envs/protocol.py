"""The protocol between the scheduler and an environment adapter."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from orchestrator.rollout import Example, Failure, Rollout


class RolloutRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Run one rollout of `example`, or a whole group where the environment scores jointly."""

    example: Example
    group_id: str
    """`env_name/example_id/attempt`."""
    index: int
    """Position in the group; 0 for a joint group."""
    group_size: int
    seed: int
    """Seed of this rollout's sampling; turn k uses `seed + k`."""
    temperature: float
    max_tokens: int
    timeout_s: float


class EnvAdapter(Protocol):
    """One environment. `run` never raises: a failure is a `Failure` with its reason. Cancellation propagates."""

    name: str
    scores_jointly: bool
    """If true, one `run` returns all rollouts of the group, and any failure drops the group."""

    @property
    def examples(self) -> Sequence[Example]:
        """All examples, in a stable order."""
        ...

    async def start(self) -> None:
        """Bring up what the environment needs."""
        ...

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | Failure]:
        """One result, or `group_size` results where `scores_jointly`. Returns within `timeout_s`."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent."""
        ...
