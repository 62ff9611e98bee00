"""`ExampleOrder`: which example comes at which position. A pure function of the seed and the position.

So the whole position in the data is one integer, the cursor, and a restarted orchestrator that knows it continues with
exactly the examples that would have come. Positions are cut into blocks of `BLOCK` slots; a block gives every
environment its share of slots, shuffled. An environment's n-th slot visits example `n % size` of its epoch
`n // size`, in an order drawn anew for every epoch. The epoch is the attempt number that keeps two visits apart.

An environment with a curriculum (`curriculum.py`) has its examples chosen by that: its n-th slot visits what the
curriculum says, and `n` is the attempt number. Which slots it has does not depend on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orchestrator.data.curriculum import Curriculum
from orchestrator.data.seeds import permutation

BLOCK = 1000
"""Slots of one block: ratios are met to a thousandth."""

Indices = npt.NDArray[np.int64]
Slots = list[tuple[int, int]]
"""For each slot of a block: its environment, and how many slots of the block that one had before."""


@dataclass(frozen=True, slots=True)
class EnvShare:
    """One environment as the order sees it."""

    name: str
    num_examples: int
    ratio: float
    refresh_groups: int = 0
    """Visits in one round of its curriculum; 0: it has none."""


@dataclass(frozen=True, slots=True)
class Visit:
    """Position `seq` visits example `example_index` of `env_name` for the `attempt`-th time (from 0)."""

    seq: int
    env_name: str
    example_index: int
    attempt: int


def slots_per_block(ratios: Sequence[float], block: int = BLOCK) -> list[int]:
    """Slots of each environment, summing to `block`: largest remainders, and at least one each."""
    if len(ratios) > block:
        raise ValueError(f"at most {block} environments can be mixed, got {len(ratios)}")
    free = block - len(ratios)
    exact = [free * ratio / sum(ratios) for ratio in ratios]
    slots = [1 + int(share) for share in exact]
    by_remainder = sorted(range(len(ratios)), key=lambda index: (int(exact[index]) - exact[index], index))
    for index in by_remainder[: block - sum(slots)]:
        slots[index] += 1
    return slots


class ExampleOrder:
    """`visit(seq)` for any `seq >= 0`, in any order. Keeps only the newest permutation of each kind."""

    def __init__(
        self, seed: int, shares: Sequence[EnvShare], curricula: Mapping[str, Curriculum] | None = None
    ) -> None:
        for share in shares:
            if share.num_examples < 1:
                raise ValueError(f"environment {share.name!r} has no examples")
        self._seed = seed
        self._shares = tuple(shares)
        self._curricula = curricula or {}
        self._slots = slots_per_block([share.ratio for share in shares])
        self._newest: dict[str, tuple[int, Indices]] = {}
        self._newest_block: tuple[int, Slots] = (0, self._block(0))

    def env_name(self, seq: int) -> str:
        """Whose example position `seq` visits."""
        return self._slot(seq)[0].name

    def is_ready(self, seq: int) -> bool:
        """Whether the example at position `seq` can be chosen yet: a curriculum may wait for outcomes."""
        share, nth = self._slot(seq)
        return share.name not in self._curricula or self._curricula[share.name].is_ready(nth)

    def visit(self, seq: int) -> Visit:
        """What position `seq`, which must be ready, visits."""
        share, nth = self._slot(seq)
        if share.name in self._curricula:
            return Visit(seq, share.name, self._curricula[share.name].example(nth), nth)
        attempt, position = divmod(nth, share.num_examples)
        order = self._permutation(f"env/{share.name}", attempt, share.num_examples)
        return Visit(seq, share.name, int(order[position]), attempt)

    def _slot(self, seq: int) -> tuple[EnvShare, int]:
        """The environment of position `seq`, and how many slots it had before."""
        block, offset = divmod(seq, BLOCK)
        if self._newest_block[0] != block:
            self._newest_block = (block, self._block(block))
        env_index, rank = self._newest_block[1][offset]
        return self._shares[env_index], block * self._slots[env_index] + rank

    def _block(self, block: int) -> Slots:
        """Made once per block: array operations give up the interpreter, and every visit would wait to get it back."""
        owners = np.repeat(np.arange(len(self._shares)), self._slots)[permutation(BLOCK, self._seed, "block", block)]
        num_seen = [0] * len(self._shares)
        slots = []
        for env_index in owners.tolist():
            slots.append((env_index, num_seen[env_index]))
            num_seen[env_index] += 1
        return slots

    def _permutation(self, kind: str, number: int, size: int) -> Indices:
        newest = self._newest.get(kind)
        if newest is None or newest[0] != number:
            newest = (number, permutation(size, self._seed, kind, number))
            self._newest[kind] = newest
        return newest[1]
