"""Samples into bins under a token cap: the two packers that a plan is made of. Pure, deterministic, numbers only."""

import heapq
from bisect import bisect_left, insort

import numpy as np

from trainer.arrays import IntArray

ATTENTION_KNEE_TOKENS = 16_384
"""Length at which attention costs about as much as the rest of the network: 12 x the hidden size of a small model."""

SKIPS_PER_SAMPLE = 1
"""Full bins looked at in vain, per sample on average, after which spreading gives up: it bounds the time of a plan."""


def compute_cost(lengths: IntArray) -> IntArray:
    """Relative cost of a forward and backward pass over one sample: linear layers plus quadratic attention."""
    return lengths * ATTENTION_KNEE_TOKENS + lengths * lengths


def best_fit_decreasing(lengths: IntArray, cap: int) -> tuple[IntArray, int]:
    """(bin of each sample, number of bins). A bin holds at most `cap` tokens, or a single longer sample."""
    sizes: list[int] = lengths.tolist()
    bin_of = [0] * len(sizes)
    # Bins with room as `free tokens * len + bin`, sorted: the first that fits leaves the least room.
    stride = len(sizes) + 1
    free: list[int] = []
    num_bins = 0
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = sizes[row]
        position = bisect_left(free, length * stride)
        if position < len(free):
            room, target = divmod(free.pop(position), stride)
        else:
            room, target = cap, num_bins
            num_bins += 1
        bin_of[row] = target
        if room > length:
            insort(free, (room - length) * stride + target)
    return np.array(bin_of, dtype=np.int64), num_bins


def spread_by_cost(lengths: IntArray, num_bins: int, cap: int) -> IntArray | None:
    """Bin of each sample so that bins cost about the same: the dearest sample first, into the cheapest bin with room.

    `None` if that order does not fit under the cap, or only after a long search (bins nearly full, little to gain); the
    caller then keeps the tight packing it has.
    """
    sizes, costs = lengths.tolist(), compute_cost(lengths).tolist()
    heap = [(0, target, cap) for target in range(num_bins)]  # (cost so far, bin, free tokens)
    bin_of = [0] * len(sizes)
    skips_left = SKIPS_PER_SAMPLE * len(lengths)
    for row in np.argsort(-lengths, kind="stable").tolist():
        length, too_full = sizes[row], []
        while heap and heap[0][2] < length and heap[0][0] > 0:
            too_full.append(heapq.heappop(heap))
        skips_left -= len(too_full)
        if not heap or skips_left < 0:
            return None
        cost, target, room = heap[0]
        heapq.heapreplace(heap, (cost + costs[row], target, room - length))
        bin_of[row] = target
        for entry in too_full:
            heapq.heappush(heap, entry)
    return np.array(bin_of, dtype=np.int64)
