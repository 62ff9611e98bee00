"""What a rollout became: a `Rollout` with its saved columns, or a `RolloutFailure`; nothing unsound is trained."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel

from orchestrator.engines.protocol import EngineError, InvalidResponse
from orchestrator.envs.protocol import RolloutRequest
from orchestrator.envs.session import AnySession
from orchestrator.errors import StateColumnError
from orchestrator.values.rollout import FailureReason, Rollout, RolloutFailure
from orchestrator.values.staleness import oldest_version


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
