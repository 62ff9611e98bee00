"""The border where results of an environment come in: what is not sound becomes a `Failure`, never training data."""

import math
from collections.abc import Sequence

from orchestrator.metrics import oldest_version
from orchestrator.rollout import Failure, FailureReason, Rollout


def accept(results: Sequence[Rollout | Failure], expected: int, version: int) -> list[Rollout | Failure]:
    """Exactly `expected` results. `version` was live at dispatch: anything older breaks the staleness bound."""
    if len(results) != expected:
        failure = Failure(FailureReason.ENV_ERROR, f"the environment returned {len(results)} results, not {expected}")
        return [failure] * expected
    return [_accept(result, version) for result in results]


def _accept(result: Rollout | Failure, version: int) -> Rollout | Failure:
    if isinstance(result, Failure):
        return result
    if not math.isfinite(result.reward):
        return Failure(FailureReason.INVALID_REWARD, f"reward {result.reward} is not a finite number")
    if not result.num_sampled_tokens:
        return Failure(FailureReason.ENV_ERROR, "it ended without a single sampled token: no model was called")
    oldest = oldest_version(result)
    if oldest is not None and oldest < version:
        return Failure(FailureReason.STALE, f"sampled by policy version {oldest}, but {version} was live at dispatch")
    return result


def lost_tries(results: Sequence[Rollout | Failure]) -> list[Failure]:
    """How each of these rollouts ended, if they are to be run again because one of them failed; empty if none did.

    Rollouts of a joint group that finished cannot be used without the one that failed: they are cancelled.
    """
    if all(isinstance(result, Rollout) for result in results):
        return []
    unusable = Failure(FailureReason.CANCELLED, "its jointly scored group is run again")
    return [result if isinstance(result, Failure) else unusable for result in results]
