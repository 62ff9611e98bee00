"""What a rollout became: a `Rollout` that can be trained on, or a `Failure` with its reason."""

import math
from collections.abc import Mapping

from orchestrator.engines.protocol import EngineError, InvalidResponse
from orchestrator.envs.protocol import RolloutRequest
from orchestrator.gateway.session import AnySession
from orchestrator.rollout import Failure, FailureReason, Rollout


def failure_of(error: Exception) -> Failure:
    """Who is to blame for `error`: the engine, or else the environment."""
    if isinstance(error, InvalidResponse):
        return Failure(FailureReason.INVALID_RESPONSE, str(error))
    if isinstance(error, EngineError):
        return Failure(FailureReason.ENGINE_ERROR, str(error))
    return Failure(FailureReason.ENV_ERROR, f"{type(error).__name__}: {error}")


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
