"""`Job` and `Completion`, `ScoreJob` and `Scores`: a request and its result, inside the inference service.

The HTTP routes make jobs out of what clients send; engines know nothing of HTTP.
"""

from collections.abc import Callable
from dataclasses import dataclass

from inference.api.arrays import Floats, Int32s
from inference.api.images import Images
from transport.wire.generation import FinishReason
from transport.wire.sample import VersionSpan


@dataclass(frozen=True, slots=True)
class Job:
    """Sample at most `max_tokens` tokens after `prompt` (at least one token)."""

    prompt: Int32s
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    """Beside the model's own end-of-sequence ids."""
    num_top_logprobs: int = 0
    """How many of the likeliest tokens to report at each position."""
    should_stop: Callable[[Int32s], bool] | None = None
    """Called between decode steps with the tokens sampled so far; True ends the generation with `stop`."""
    images: Images | None = None
    """What the placeholders of the prompt stand for."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The likeliest tokens at one position, best first."""

    token_ids: Int32s
    logprobs: Floats


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled. `logprobs` are those of the distribution at the job's temperature, before top-p truncation
    (at temperature 0: at temperature 1)."""

    token_ids: Int32s
    logprobs: Floats
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Give the log probabilities of all tokens (at least one); `temperature` is positive."""

    token_ids: Int32s
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Scores:
    """float32[T] at the job's temperature, 0 at position 0; `version` computed all of them."""

    logprobs: Floats
    version: int
