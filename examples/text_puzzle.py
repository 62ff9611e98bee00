"""`TextPuzzle`: a string goes in, its transformation is the right answer. Shared by environments and tiny models.

A tiny model is warm-started on exactly the prompts that the environment of the same name will send, so both take them
from here. Neither torch nor verifiers is imported.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class TextPuzzle:
    """One family of questions: every string of `length` letters of `alphabet` is one."""

    name: str
    """Id of the environment that asks these questions."""
    verb: str
    """What the model is told to do."""
    alphabet: str
    length: int
    transform: Callable[[str], str]
    """Question text to right answer."""

    def __post_init__(self) -> None:
        if self.length < 1 or not self.alphabet:
            raise ValueError(f"{self.name}: needs a length >= 1 and a non-empty alphabet")
        if len(set(self.alphabet)) < len(self.alphabet):
            raise ValueError(f"{self.name}: alphabet {self.alphabet!r} has repeated letters")

    @property
    def num_texts(self) -> int:
        """How many different questions there are."""
        return int(len(self.alphabet) ** self.length)

    def prompt(self, text: str) -> str:
        """The user message that asks about `text`."""
        return f"{self.verb}: {text}"

    def answer(self, text: str) -> str:
        """The only right reply to `prompt(text)`."""
        return self.transform(text)

    def text(self, number: int) -> str:
        """Question `number` of `num_texts`: its digits in base `len(alphabet)`."""
        letters = []
        for _ in range(self.length):
            number, digit = divmod(number, len(self.alphabet))
            letters.append(self.alphabet[digit])
        return "".join(letters)

    def sample(self, num: int, seed: int) -> list[str]:
        """`num` different texts, the same for the same seed. Raises `ValueError` if there are not that many."""
        if num > self.num_texts:
            raise ValueError(f"{self.name}: only {self.num_texts} different texts exist, {num} were asked for")
        return [self.text(number) for number in random.Random(seed).sample(range(self.num_texts), num)]

    def resized(self, alphabet: str | None, length: int | None) -> "TextPuzzle":
        """The same puzzle over other strings; `None` keeps what it has."""
        return replace(self, alphabet=alphabet or self.alphabet, length=length or self.length)


# Sizes at which a 100k-parameter model learns reliably within a hundred steps from a warm start of 0.2.
REVERSE = TextPuzzle("reverse-text", "reverse", "abcdef", 4, lambda text: text[::-1])
COPY = TextPuzzle("copy-text", "copy", "abcdefgh", 5, lambda text: text)

PUZZLES: Mapping[str, TextPuzzle] = MappingProxyType({puzzle.name: puzzle for puzzle in (REVERSE, COPY)})
"""All puzzles by name."""
