"""`InferenceEngine`: what the HTTP server needs of an engine, and says of it. Imports no model library."""

from dataclasses import dataclass
from typing import Protocol

import msgspec

from inference.api.generation import Completion, Job, ScoreJob, Scores
from inference.api.images import ImageLimits
from transport.wire.generation import ServedWeights, UpdateTimes

MAX_WAITING = 16384
"""Requests that may wait for a place, more are answered with 429: some 30 times the rollouts that one orchestrator has
in flight by default, and with prompts of a few thousand tokens still below a gigabyte of memory."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request must respect."""

    vocab_size: int
    max_model_len: int
    max_batch_size: int
    max_waiting: int = MAX_WAITING
    images: ImageLimits | None = None
    """What images must be; `None` where none is taken."""


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


class InferenceEngine(Protocol):
    """All methods belong to the event loop it was made in."""

    @property
    def limits(self) -> EngineLimits:
        """Fixed at start-up."""
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
        """A snapshot of the counters."""
        ...

    async def generate(self, job: Job) -> Completion:
        """Run a job that fits `limits`. Cancelling frees its slot. Raises `QueueFull`, `Unavailable` or
        `NonFiniteLogits`."""
        ...

    async def score(self, job: ScoreJob) -> Scores:
        """Score a job that fits `limits`. Raises `Unsupported`, `QueueFull`, `Unavailable` or `NonFiniteLogits`."""
        ...

    async def read_served(self) -> ServedWeights:
        """`served`, read anew from where the engine computes. Raises `Unavailable`."""
        ...

    async def apply_weights(self, location: str, version: int) -> ServedWeights:
        """Fetch and verify a publish, then swap it in between two decode steps.

        `location` is as `transport.wire.weights` spells it. Raises `WeightsRefused`: nothing changed."""
        ...


def engine_facts(engine: InferenceEngine) -> dict[str, object]:
    """The part of `/health` that docs/contracts.md promises of every engine."""
    stats, served, limits = engine.stats, engine.served, engine.limits
    return {
        "version": served.version,
        "digest": served.digest,
        "running": stats.running,
        "waiting": stats.waiting,
        "max_batch_size": limits.max_batch_size,
        "max_model_len": limits.max_model_len,
        "vocab_size": limits.vocab_size,
        "last_update": phases_of(engine.last_update),
    }


def phases_of(times: UpdateTimes | None) -> dict[str, float]:
    """Seconds of an update by phase; empty before the first."""
    phases = {} if times is None else msgspec.structs.asdict(times)
    return {phase: round(seconds, 4) for phase, seconds in phases.items()}


def describe_update(times: UpdateTimes | None) -> str:
    """The same for the end of a line of the log."""
    return "".join(f", {phase.removesuffix('_s')} {seconds:.3f} s" for phase, seconds in phases_of(times).items())
