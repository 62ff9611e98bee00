"""`reverse-text`: write a word backwards. One turn, reward 1 for the exact answer."""

from text_puzzle import REVERSE
from text_taskset import TextTaskset

__all__ = ["ReverseTextTaskset"]


class ReverseTextTaskset(TextTaskset):
    """`reverse: abcd` is answered with `dcba`."""

    puzzle = REVERSE
