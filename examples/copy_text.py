"""`copy-text`: repeat a word. One turn, reward 1 for the exact answer. The easiest task that needs attention at all."""

from text_puzzle import COPY
from text_taskset import TextTaskset

__all__ = ["CopyTextTaskset"]


class CopyTextTaskset(TextTaskset):
    """`copy: abcde` is answered with `abcde`."""

    puzzle = COPY
