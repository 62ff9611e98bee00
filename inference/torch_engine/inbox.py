"""`Inbox`: what the event loop wants of the engine's thread, in order.

Bounded by its one sender: `TorchEngine` admits a limited number of open jobs, and awaits every other command.
"""

import asyncio
import threading
from collections import deque
from dataclasses import dataclass

from inference.scoring import ScoreJob, Scores
from inference.torch_engine.sequence import Sequence
from inference.torch_engine.weights import VerifiedWeights
from transport.generation import ServedWeights


@dataclass(frozen=True, slots=True)
class Add:
    """Generate."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody waits for this one any more."""

    key: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Serve other weights; the reply says what is served afterwards, and in how many seconds they were put in."""

    weights: VerifiedWeights
    reply: "asyncio.Future[tuple[ServedWeights, float]]"


@dataclass(frozen=True, slots=True)
class Score:
    """Log probabilities of a whole sequence under the weights in service."""

    job: ScoreJob
    reply: "asyncio.Future[Scores | Exception]"


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread after the current step."""


Command = Add | Abort | Swap | Score | Stop


class Inbox:
    """A mailbox between two threads."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._arrived = threading.Condition()

    def put(self, command: Command) -> None:
        """Leave a command and wake the reader. Never blocks for long."""
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify()

    def take(self, timeout_s: float) -> list[Command]:
        """All commands there are, in order; waits up to `timeout_s` for the first."""
        with self._arrived:
            if timeout_s > 0:
                self._arrived.wait_for(lambda: bool(self._commands), timeout_s)
            commands = list(self._commands)
            self._commands.clear()
            return commands
