"""`EnvAdapter`: what an environment is to the scheduler, and how it is called and closed without harm."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec
from loguru import logger

from orchestrator.values.rollout import Example, FailureReason, Rollout, RolloutFailure
from runtime.errors import ServiceError


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
    """One environment. `run` never raises: a failure is a `RolloutFailure` with its reason. Cancellation propagates."""

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

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
        """One result, or `group_size` results where `scores_jointly`. Returns within `timeout_s`."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent."""
        ...


CLOSE_TIMEOUT_S = 30.0
"""Seconds that an environment may take to close, its workers included."""


async def close_adapter(adapter: EnvAdapter, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
    """Close `adapter`; one that raises or takes longer than `timeout_s` costs a warning."""
    try:
        async with asyncio.timeout(timeout_s):
            await adapter.close()
    except TimeoutError:
        logger.warning("environment {} is not closed after {:g} s: it is left alone", adapter.name, timeout_s)
    except Exception as error:  # a decision: nothing of the run depends on it any more
        logger.opt(exception=error).warning("environment {} did not close: {}", adapter.name, error)


DEADLINE_GRACE_S = 5.0
"""Seconds that an adapter may overrun the timeout it was given before it is cut off."""


async def call_adapter(adapter: EnvAdapter, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
    """What the adapter returns; an adapter that breaks its promises costs its rollouts, not the run."""
    num_results = request.group_size if adapter.scores_jointly else 1
    try:
        async with asyncio.timeout(request.timeout_s + DEADLINE_GRACE_S):
            return await adapter.run(request)
    except TimeoutError:
        failure = RolloutFailure(FailureReason.ENV_TIMEOUT, f"no result {DEADLINE_GRACE_S:g} s after its deadline")
    except ServiceError:  # the user must mend it: no rollout will do better
        raise
    except Exception as error:  # a decision: the error-rate guard stops the run if it keeps happening
        logger.opt(exception=error).debug("environment {} raised", adapter.name)
        failure = RolloutFailure(FailureReason.ENV_ERROR, f"{type(error).__name__}: {error}")
    return [failure] * num_results
