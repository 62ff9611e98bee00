"""`Engine`: what the HTTP server needs of an engine. Importing this imports no model library."""

from dataclasses import dataclass
from typing import Protocol

from inference.generation import Completion, Job, ScoreJob, Scores
from inference.images import ImageLimits
from transport.generation import ServedWeights, UpdateTimes


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request must respect."""

    vocab_size: int
    max_model_len: int
    max_batch_size: int
    max_waiting: int
    images: ImageLimits | None = None
    """What pictures must be; `None` where none is taken."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Numbers for people and metrics; totals since the start."""

    running: int
    waiting: int
    swapping: bool
    """Verified weights wait for the end of the step that is being decoded."""
    decode_steps: int
    sampled_tokens: int
    prefilled_tokens: int


class Engine(Protocol):
    """All methods belong to the event loop it was made in."""

    @property
    def limits(self) -> EngineLimits:
        """Fixed at start-up."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end every generation."""
        ...

    @property
    def failure(self) -> Exception | None:
        """Why the engine died; None while it lives."""
        ...

    @property
    def served(self) -> ServedWeights:
        """Version and digest of the tensors that the engine computes with."""
        ...

    @property
    def last_update(self) -> UpdateTimes | None:
        """How long the last weight update took; None before the first."""
        ...

    @property
    def stats(self) -> EngineStats:
        """A snapshot."""
        ...

    async def generate(self, job: Job) -> Completion:
        """Run a job that fits `limits`. Cancelling frees its slot. Raises `QueueFull`, `Unavailable` or
        `NonFiniteLogits`."""
        ...

    async def score(self, job: ScoreJob) -> Scores:
        """Score a job that fits `limits`. Raises `Unsupported`, `QueueFull`, `Unavailable` or `NonFiniteLogits`."""
        ...

    async def apply_weights(self, location: str, version: int) -> ServedWeights:
        """Fetch and verify a publish, then swap it in between two decode steps. `location` is as `transport.location`
        spells it. Raises `WeightsRefused`: nothing changed."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Take no more jobs, give the open ones `grace_s` to finish, end the rest with `Unavailable`. Idempotent."""
        ...

    async def ended(self) -> None:
        """Return when the engine has ended, by `stop` or by death."""
        ...
