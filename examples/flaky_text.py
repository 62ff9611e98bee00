"""`flaky-text`: `copy-text` whose scoring fails on purpose, at set rates: it raises, hangs, or returns NaN.

Which rollouts fail is a pure function of the seed, the example and the reply, so that a run that is killed and
restarted meets the same faults again, in whatever order its rollouts finish.
"""

import asyncio
import hashlib
import math
from enum import StrEnum

import verifiers.v1 as vf
from pydantic import Field, model_validator

from text_puzzle import COPY
from text_taskset import TextData, TextTask, TextTaskset, TextTasksetConfig, last_reply

__all__ = ["FlakyTextTaskset"]


class Fault(StrEnum):
    """What happens to a rollout."""

    NONE = "none"
    """It is scored as in `copy-text`."""
    RAISE = "raise"
    """Scoring raises."""
    HANG = "hang"
    """Scoring takes `hang_s` longer."""
    NAN = "nan"
    """The reward is not a number."""


class PlannedError(RuntimeError):
    """Raised by scoring when the plan says so."""


class FlakyTaskConfig(vf.TaskConfig):
    """How often and how it fails. The rates add up to at most 1."""

    raise_rate: float = Field(0.1, ge=0, le=1)
    """Share of rollouts whose scoring raises."""
    hang_rate: float = Field(0.0, ge=0, le=1)
    """Share of rollouts whose scoring hangs."""
    nan_rate: float = Field(0.0, ge=0, le=1)
    """Share of rollouts whose reward is NaN."""
    hang_s: float = Field(3600.0, gt=0)
    """Seconds that a hanging one takes."""
    fault_seed: int = 0
    """Another seed fails other rollouts."""

    @model_validator(mode="after")
    def _check_rates(self) -> "FlakyTaskConfig":
        total = self.raise_rate + self.hang_rate + self.nan_rate
        if total > 1:
            raise ValueError(f"raise_rate, hang_rate and nan_rate add up to {total:g}; at most 1 is possible")
        return self


def fault_of(config: FlakyTaskConfig, example_id: str, reply: str) -> Fault:
    """The fate of `reply` to `example_id`: always the same for the same config."""
    key = f"{config.fault_seed}\0{example_id}\0{reply}".encode()
    draw = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") / 2**64
    for fault, rate in ((Fault.RAISE, config.raise_rate), (Fault.HANG, config.hang_rate), (Fault.NAN, config.nan_rate)):
        if draw < rate:
            return fault
        draw -= rate
    return Fault.NONE


class FlakyTextTask(TextTask, vf.Task[TextData, vf.State, FlakyTaskConfig]):
    """A word to copy, with trouble ahead."""

    @vf.reward
    async def exact_match(self, task: TextData, trace: vf.Trace) -> float:
        """1 or 0 as in `copy-text`, NaN, late, or a `PlannedError`."""
        reply = last_reply(trace)
        match fault_of(self.config, task.id or "", reply):
            case Fault.RAISE:
                raise PlannedError(f"scoring of {reply!r} for {task.id} fails on purpose")
            case Fault.NAN:
                return math.nan
            case Fault.HANG:
                await asyncio.sleep(self.config.hang_s)
        return float(reply == task.answer)


class FlakyTasksetConfig(TextTasksetConfig):
    """Questions as in `copy-text`; the faults are under `task`."""

    task: FlakyTaskConfig = FlakyTaskConfig()


class FlakyTextTaskset(TextTaskset, vf.Taskset[FlakyTextTask, FlakyTasksetConfig]):
    """Questions of `copy-text`, scored unreliably."""

    puzzle = COPY

    def task(self, data: TextData) -> FlakyTextTask:
        """One row with its faults."""
        return FlakyTextTask(data, self.config.task)
