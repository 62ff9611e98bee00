"""`Rollout`: what an environment gives back for one example, and `RolloutFailure`: why it did not.

Tokens live in numpy arrays from the engine's reply to the wire; no list ever holds one number per token. Environment
workers send these types as they are (`envs/workers/link.py`).

`TokenWeights`: an algorithm as the trainer sees it: how much each kind of token counts in each part of the loss.

| algorithm           | who samples | sampled tokens       | tokens of the environment |
|---------------------|-------------|----------------------|---------------------------|
| `rl`                | policy      | `rl` 1               | -                         |
| `sft`               | teacher     | `ce` weight          | -                         |
| `opd`               | policy      | `ref_kl` weight      | -                         |
| any, `observation_weight` > 0     |  as above            | `ce` observation_weight   |
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from chat.trajectory import Branch
from orchestrator.config.algorithm import AlgorithmConfig, OpdAlgorithmConfig, RlAlgorithmConfig, SftAlgorithmConfig


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Weights in the three parts of the loss. The default is plain reinforcement."""

    rl: float = 1.0
    """Sampled tokens: policy gradient."""
    ce: float = 0.0
    """Sampled tokens: cross-entropy."""
    ref_kl: float = 0.0
    """Sampled tokens: distance to the reference whose log probabilities the branch holds."""
    observation: float = 0.0
    """Tokens that the environment wrote between turns: cross-entropy."""

    @property
    def is_plain_rl(self) -> bool:
        """Whether every trained token has weight 1 in `rl`, and none elsewhere: what the trainer does unasked."""
        return self.rl == 1.0 and not (self.ce or self.ref_kl or self.observation)

    @property
    def imitates(self) -> bool:
        """Whether a teacher sampled the tokens: then it does not matter which version did, and how likely they were."""
        return self.ce > 0 and not self.rl and not self.ref_kl

    @property
    def needs_advantage(self) -> bool:
        """Whether sampled tokens teach nothing where the advantage is 0."""
        return not self.ce and not self.ref_kl


PLAIN_RL = TokenWeights()


def token_weights(config: AlgorithmConfig) -> TokenWeights:
    """The weights that the config asks for."""
    match config:
        case RlAlgorithmConfig():
            return TokenWeights(observation=config.observation_weight)
        case SftAlgorithmConfig():
            return TokenWeights(rl=0.0, ce=config.weight, observation=config.observation_weight)
        case OpdAlgorithmConfig():
            return TokenWeights(rl=config.rl_weight, ref_kl=config.weight, observation=config.observation_weight)


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
