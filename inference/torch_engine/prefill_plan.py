"""Which sequences are prefilled together, and which only copy what another one computed."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from inference.generation import Int32s

NO_PICTURES: Mapping[int, bytes] = MappingProxyType({})


class PrefillPlan(NamedTuple):
    """`batches` of slots to compute, then `copies`: slots whose tokens equal those of a computed slot."""

    batches: list[list[int]]
    copies: dict[int, list[int]]
    """Computed slot to the slots that copy it. The rollouts of one group share their prompt, so this is the rule."""


def plan_prefill(
    tokens: Mapping[int, Int32s], max_tokens: int, pictures: Mapping[int, bytes] = NO_PICTURES
) -> PrefillPlan:
    """Plan for `slot -> tokens to compute`. A batch is padded to its longest row; rows of like length share one, and
    none has more than `max_tokens` padded tokens unless a single row does. Slots without tokens are left out.
    `pictures` are digests: the same tokens with other pictures are not the same."""
    first_with: dict[tuple[bytes, bytes], int] = {}
    copies: dict[int, list[int]] = {}
    for slot, row in tokens.items():
        first = first_with.setdefault((pictures.get(slot, b""), row.tobytes()), slot)
        if first != slot and len(row):
            copies.setdefault(first, []).append(slot)
    unique = [slot for slot in first_with.values() if len(tokens[slot])]
    unique.sort(key=lambda slot: len(tokens[slot]))
    return PrefillPlan(list(_batches(unique, [len(tokens[slot]) for slot in unique], max_tokens)), copies)


def _batches(slots: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Iterable[list[int]]:
    """Cut rows sorted by length so that `rows x longest row <= max_tokens`."""
    batch: list[int] = []
    for slot, length in zip(slots, lengths, strict=True):
        if batch and (len(batch) + 1) * length > max_tokens:
            yield batch
            batch = []
        batch.append(slot)
    if batch:
        yield batch


def pad_right(rows: Sequence[Int32s]) -> Int32s:
    """Rows as one rectangle, padded with token 0."""
    padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded
