"""The verifiers half of a `TextPuzzle`: rows, exact-match reward, and a taskset that loads them.

An environment of one puzzle is a module that exports a `TextTaskset` subclass naming the puzzle (`reverse_text`).
"""

from collections.abc import Iterator
from typing import ClassVar

import verifiers.v1 as vf
from pydantic import Field, model_validator

from text_puzzle import TextPuzzle


class TextData(vf.TaskData):
    """One question."""

    answer: str
    """The only right reply."""


class TextTask(vf.Task[TextData]):
    """A question that is answered in one reply."""

    @vf.reward
    async def exact_match(self, task: TextData, trace: vf.Trace) -> float:
        """1 if the reply is the answer, to the letter; else 0."""
        return float(last_reply(trace) == task.answer)


class TextTasksetConfig(vf.TasksetConfig):
    """Which questions are asked."""

    num_examples: int | None = Field(None, ge=1)
    """Different questions; by default 1024, or all if there are fewer."""
    seed: int = 0
    """Seed of the choice of questions and of their order."""
    alphabet: str | None = Field(None, min_length=1)
    """Letters of the questions; the puzzle's own by default."""
    length: int | None = Field(None, ge=1)
    """Letters in one question; the puzzle's own by default."""

    @model_validator(mode="after")
    def _check_alphabet(self) -> "TextTasksetConfig":
        if self.alphabet and len(set(self.alphabet)) < len(self.alphabet):
            raise ValueError(f"alphabet {self.alphabet!r} has repeated letters")
        return self


class TextTaskset(vf.Taskset[TextTask, TextTasksetConfig]):
    """Questions of `puzzle`. The id of a row is its text, so it names the same example after any restart."""

    puzzle: ClassVar[TextPuzzle]
    default_num_examples: ClassVar[int] = 1024

    def load(self) -> Iterator[TextTask]:
        """All rows, without repetition. Raises `ValueError` if more are asked for than exist."""
        puzzle = self.puzzle.resized(self.config.alphabet, self.config.length)
        num = self.config.num_examples or min(self.default_num_examples, puzzle.num_texts)
        for text in puzzle.sample(num, self.config.seed):
            yield self.task(TextData(id=text, prompt=puzzle.prompt(text), answer=puzzle.answer(text)))

    def task(self, data: TextData) -> TextTask:
        """The task of one row; subclasses with their own `Task` override it."""
        return TextTask(data, self.config.task)


def replies(trace: vf.Trace) -> list[str]:
    """What the model said, turn by turn, unstripped; an empty completion is an empty string."""
    return [message.content or "" for message in trace.assistant_messages]


def last_reply(trace: vf.Trace) -> str:
    """The last of `replies`, or an empty string."""
    return next(reversed(replies(trace)), "")
