"""`EnvAdapter`: what an environment is to the scheduler, and how it is called and closed without harm.

What a rollout became is a `Rollout` with its saved columns, or a `RolloutFailure`; nothing unsound is trained.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from loguru import logger
from pydantic import BaseModel

from orchestrator.engines.protocol import EngineError, InvalidResponse
from orchestrator.envs.session import AnySession
from orchestrator.errors import StateColumnError
from orchestrator.values.group import oldest_version
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


def failure_of(error: Exception) -> RolloutFailure:
    """Who is to blame for `error`: the engine, or else the environment."""
    if isinstance(error, InvalidResponse):
        return RolloutFailure(FailureReason.INVALID_RESPONSE, str(error))
    if isinstance(error, EngineError):
        return RolloutFailure(FailureReason.ENGINE_ERROR, str(error))
    return RolloutFailure(FailureReason.ENV_ERROR, f"{type(error).__name__}: {error}")


def scored(
    request: RolloutRequest,
    session: AnySession,
    *,
    reward: float,
    metrics: Mapping[str, float | None],
    duration_s: float,
    columns: Mapping[str, bytes],
) -> Rollout:
    """The session as a rollout with this reward. Whether it can be trained on is for `acceptance.py` to say."""
    return Rollout(
        env_name=request.example.env_name,
        example_id=request.example.example_id,
        reward=float(reward),
        branches=session.trajectory.branches(),
        temperature=request.temperature,
        is_truncated=session.is_truncated,
        metrics={name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)},
        messages=tuple(dict(message) for message in session.trajectory.messages),
        duration_s=duration_s,
        sampling_args={
            "temperature": session.plan.temperature,
            "max_tokens": session.plan.max_tokens,
            "seed": session.plan.seed,
        },
        columns=columns,
    )


REQUIRED_COLUMNS = ("trajectory", "sampling_args")
"""Saved with every rollout, first."""


def saved_columns(extra: Sequence[str]) -> tuple[str, ...]:
    """All columns of an environment: required ones first, duplicates dropped, order kept."""
    return tuple(dict.fromkeys((*REQUIRED_COLUMNS, *extra)))


def read_columns(env_name: str, extra: Sequence[str], state: Mapping[str, Any]) -> dict[str, bytes]:
    """The columns that come from the state, as JSON. Raises `StateColumnError` with the column's name."""
    names = [name for name in saved_columns(extra) if name not in REQUIRED_COLUMNS]
    return {name: _encode(env_name, name, state) for name in names}


def _encode(env_name: str, name: str, state: Mapping[str, Any]) -> bytes:
    if name not in state:
        known = ", ".join(sorted(state)) or "no fields"
        raise StateColumnError(
            f"env {env_name!r}: its state has no column {name!r} (it has {known}); change envs[].state_columns"
        )
    try:
        return msgspec.json.encode(state[name], enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StateColumnError(
            f"env {env_name!r}: state column {name!r} cannot be saved as JSON ({error}); change envs[].state_columns"
        ) from error


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"it holds a {type(value).__name__}")


def accept(results: Sequence[Rollout | RolloutFailure], expected: int, version: int) -> list[Rollout | RolloutFailure]:
    """Exactly `expected` results. `version` was live at dispatch: anything older breaks the staleness bound."""
    if len(results) != expected:
        failure = RolloutFailure(
            FailureReason.ENV_ERROR, f"the environment returned {len(results)} results, not {expected}"
        )
        return [failure] * expected
    return [_accept(result, version) for result in results]


def _accept(result: Rollout | RolloutFailure, version: int) -> Rollout | RolloutFailure:
    if isinstance(result, RolloutFailure):
        return result
    if not math.isfinite(result.reward):
        return RolloutFailure(FailureReason.INVALID_REWARD, f"reward {result.reward} is not a finite number")
    if not result.num_sampled_tokens:
        return RolloutFailure(FailureReason.ENV_ERROR, "it ended without a single sampled token: no model was called")
    oldest = oldest_version(result)
    if oldest is not None and oldest < version:
        return RolloutFailure(
            FailureReason.STALE, f"sampled by policy version {oldest}, but {version} was live at dispatch"
        )
    return result


def lost_tries(results: Sequence[Rollout | RolloutFailure]) -> list[RolloutFailure]:
    """How each of these rollouts ended, if they are to be run again because one of them failed; empty if none did.

    Rollouts of a joint group that finished cannot be used without the one that failed: they are cancelled.
    """
    if all(isinstance(result, Rollout) for result in results):
        return []
    unusable = RolloutFailure(FailureReason.CANCELLED, "its jointly scored group is run again")
    return [result if isinstance(result, RolloutFailure) else unusable for result in results]
