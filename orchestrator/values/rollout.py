"""`Rollout`: what an environment gives back for one example, and `RolloutFailure`: why it did not.

Tokens live in numpy arrays from the engine's reply to the wire; no list ever holds one number per token. Environment
workers send these types as they are (`envs/workers/link.py`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from chat.branch import Branch

MAX_MESSAGE_CHARS = 2000
"""What is kept of the message of a failure."""


class Example(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One task of an environment. `example_id` is stable over restarts; `payload` is the adapter's own."""

    env_name: str
    example_id: str
    payload: Any


class Rollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="rollout"):
    """What an environment made of one example: a trajectory with a reward."""

    env_name: str
    example_id: str
    reward: float
    branches: tuple[Branch, ...]
    """One while every turn extends the exact tokens of the one before, several where it does not."""
    temperature: float
    is_truncated: bool
    """Whether a completion was cut at its token limit."""
    metrics: dict[str, float]
    """Extra numbers the environment reports."""
    messages: tuple[dict[str, Any], ...]
    """The conversation, for people."""
    duration_s: float
    sampling_args: Mapping[str, float | int] = {}
    """How it was sampled: temperature, max_tokens, seed."""
    columns: Mapping[str, bytes] = {}
    """The environment's `state_columns`, as JSON."""

    @property
    def num_tokens(self) -> int:
        """Tokens over all branches, prompts included."""
        return sum(len(branch.token_ids) for branch in self.branches)

    @property
    def num_sampled_tokens(self) -> int:
        """Completion tokens over all branches."""
        return int(sum(np.count_nonzero(branch.sampled) for branch in self.branches))


class FailureReason(StrEnum):
    """Why a rollout gave no training data."""

    ENV_ERROR = "env_error"
    """The environment raised."""
    WORKER_LOST = "worker_lost"
    """The worker process that played it died."""
    ENV_TIMEOUT = "env_timeout"
    """The rollout took longer than `rollout_timeout_s`."""
    ENGINE_ERROR = "engine_error"
    """The engine did not answer, after all retries."""
    INVALID_RESPONSE = "invalid_response"
    """The engine answered with something that cannot be trained on."""
    INVALID_REWARD = "invalid_reward"
    """The reward is not a finite number."""
    TEACHER_ERROR = "teacher_error"
    """The teacher did not score the rollout, after all retries."""
    STALE = "stale"
    """Sampled by a policy older than the one that was live when it was dispatched (an engine that lost its weights)."""
    CANCELLED = "cancelled"
    """The orchestrator stopped it (shutdown, or its group cannot be used any more)."""


class RolloutFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="failure"):
    """A rollout that failed: data, not a crash. Whatever an environment raised, the message can be written down."""

    reason: FailureReason
    message: str

    def __post_init__(self) -> None:
        # Names of files that are not UTF-8 come as lone surrogates, which neither JSON nor msgpack takes.
        short = self.message[:MAX_MESSAGE_CHARS].encode(errors="backslashreplace").decode()
        msgspec.structs.force_setattr(self, "message", short)


def commonest_failure(failures: Sequence[RolloutFailure]) -> tuple[RolloutFailure, int]:
    """One for the reason that most have, with the message that most of those have, and how many have the reason: many
    messages name their rollout, so that no two are equal. There must be at least one."""
    reason, count = Counter(failed.reason for failed in failures).most_common(1)[0]
    messages = Counter(failed.message for failed in failures if failed.reason is reason)
    return RolloutFailure(reason, messages.most_common(1)[0][0]), count
