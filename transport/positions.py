"""`Done`: which positions of the example order are in durable batches. A cursor with holes.

Batches in dispatch order leave no holes, and `Done` is one number. Batches in completion order pass groups that still
run: positions beyond the cursor are done while some before them are not. They are kept as spans, of which there are
never more than groups that are being waited for.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

Span = tuple[int, int]
"""Positions `[first, end)`."""


@dataclass(frozen=True, slots=True)
class Done:
    """All positions below `cursor`, which itself is not done, and those in `beyond`."""

    cursor: int = 0
    beyond: tuple[Span, ...] = ()
    """Sorted; no two touch."""

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, int) and self.next_open(seq) != seq

    def next_open(self, seq: int) -> int:
        """The first position from `seq` on that is not done."""
        seq = max(seq, self.cursor)
        index = bisect_right(self.beyond, seq, key=lambda span: span[0]) - 1
        return max(seq, self.beyond[index][1]) if index >= 0 else seq

    def add(self, seqs: Iterable[int]) -> "Done":
        """These positions are done, too."""
        merged: list[Span] = [(0, self.cursor)]
        for first, end in sorted([*self.beyond, *((seq, seq + 1) for seq in seqs)]):
            last_first, last_end = merged[-1]
            if first <= last_end:
                merged[-1] = (last_first, max(end, last_end))
            else:
                merged.append((first, end))
        return Done(merged[0][1], tuple(merged[1:]))
