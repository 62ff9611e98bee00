"""Values for tests: rollouts, tickets and groups with only the interesting part spelled out."""

from collections.abc import Sequence

import numpy as np

from chat.trajectory import Branch
from orchestrator.values.group import FinalGroup, GroupKey, ScoredGroup, Ticket
from orchestrator.values.rollout import FailureReason, Rollout, RolloutFailure
from transport.wire.sample import VersionSpan

ENV_ERROR = RolloutFailure(FailureReason.ENV_ERROR, "boom")


def make_rollout(
    reward: float = 1.0, *, env_name: str = "copy", example_id: str = "0", length: int = 3, version: int = 0
) -> Rollout:
    """Two prompt tokens and `length` sampled ones."""
    sampled = np.array([False, False] + [True] * length)
    branch = Branch(
        token_ids=np.arange(2 + length, dtype=np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -0.5, 0.0).astype(np.float32),
        versions=(VersionSpan(version, 2, 2 + length),),
    )
    return Rollout(
        env_name=env_name,
        example_id=example_id,
        reward=reward,
        branches=(branch,),
        temperature=1.0,
        is_truncated=False,
        metrics={},
        messages=({"role": "user", "content": "hi"},),
        duration_s=0.1,
    )


def make_ticket(
    seq: int = 0, size: int = 2, *, joint: bool = False, env_name: str = "copy", version: int = 0
) -> Ticket:
    """A dispatched group whose example is its position."""
    return Ticket(GroupKey(env_name, str(seq), 0), seq, size, joint, version)


def make_group(
    results: Sequence[float | RolloutFailure], seq: int = 0, *, joint: bool = False, version: int = 0
) -> FinalGroup:
    """A final group: numbers are the rewards of rollouts that finished."""
    ticket = make_ticket(seq, len(results), joint=joint, version=version)
    members = tuple(
        result if isinstance(result, RolloutFailure) else make_rollout(result, example_id=str(seq), version=version)
        for result in results
    )
    return FinalGroup(ticket, members)


def make_scored(num_trainable: int, seq: int, size: int) -> ScoredGroup:
    """A group of `size` that brings `num_trainable` rollouts to a batch; 0 is a filtered one."""
    rollouts = (_ROLLOUT,) * num_trainable
    group = FinalGroup(make_ticket(seq, size), (*rollouts, *[ENV_ERROR] * (size - num_trainable)))
    return ScoredGroup(group, (1.0,) * num_trainable, None if num_trainable else "zero_signal")


_ROLLOUT = make_rollout()
