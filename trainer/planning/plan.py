"""`plan_step`: from a manifest and a layout to who trains what, in which order.

    manifest ─▶ mini-batches of whole trajectories ─▶ bins under the token cap ─▶ rounds of one bin per rank
                     └─▶ visits: which mini-batch each optimizer step trains, over all epochs

Pure: every rank computes the same plan from the same manifest, and `digest` lets them prove it. Ranks move in
lock-step, one round at a time, so a round costs what its dearest bin costs: bins of like cost share a round, and a
bin without samples becomes a one-token dummy instead of a copy of real work. Bins with images share rounds too: in a
round where any rank sees an image all ranks must run the vision tower, if need be on a dummy image.

`best_fit_decreasing` and `spread_by_cost` put samples into bins under a token cap.
"""

import heapq
import itertools
from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

from trainer.arrays import IntArray
from trainer.errors import PlanError
from trainer.planning.layout import Layout, RowSharing, units_of
from transport.wire.manifest import IMAGE, BatchManifest

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


WORTH_SPREADING = 0.985
"""Share of the room in all micro batches above which they are so full that no order of them costs much less."""


@dataclass(frozen=True)
class GlobalCounts:
    """What one mini-batch holds over all ranks, dummies and padding excluded."""

    num_samples: int
    num_trajectories: int
    num_groups: int
    """Whole groups, or the parts of groups that are in this mini-batch."""
    num_tokens: int
    """After cutting samples to `seq_len`."""
    num_loss_tokens: int
    """As the manifest states them: an upper bound where samples are cut."""


@dataclass(frozen=True)
class MiniBatchPlan:
    """The micro batches of one optimizer step: `num_rounds` for every rank."""

    num_rounds: int
    num_ranks: int
    rows: IntArray
    """Rows of the manifest, ordered by rank, then by round."""
    offsets: IntArray
    """Where bin `rank * num_rounds + round` begins in `rows`; one entry more than bins."""
    counts: GlobalCounts
    image_rounds: npt.NDArray[np.bool_]
    """Rounds in which the vision tower runs, on every rank."""

    def micro_batch_rows(self, rank: int, round_index: int) -> IntArray:
        """Rows that `rank` trains in this round, ascending; none: a dummy."""
        bin_index = rank * self.num_rounds + round_index
        return self.rows[self.offsets[bin_index] : self.offsets[bin_index + 1]]

    def rows_for(self, rank: int) -> IntArray:
        return self.rows[self.offsets[rank * self.num_rounds] : self.offsets[(rank + 1) * self.num_rounds]]


@dataclass(frozen=True)
class StepPlan:
    """Every row of the manifest is in exactly one micro batch of one rank of one mini-batch."""

    step: int
    batch_digest: str
    env_names: tuple[str, ...]
    seq_len: int
    lengths: IntArray
    """Trained length of each row: its tokens, cut to `seq_len`."""
    mini_batches: tuple[MiniBatchPlan, ...]
    visits: tuple[int, ...]
    """Index into `mini_batches` of every optimizer step, in order: each one once per epoch."""
    units: IntArray
    """Unit of each row, as `Weighting` cuts the batch."""
    num_units: int

    def rows_for(self, rank: int) -> IntArray:
        """Rows that `rank` must fetch, ascending."""
        return np.sort(np.concatenate([mini_batch.rows_for(rank) for mini_batch in self.mini_batches]))

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks exactly if they are about to train the same batch in the same way."""
        state = xxhash.xxh3_128(f"{self.step}/{self.batch_digest}/{self.seq_len}/{self.visits}".encode())
        state.update(self.units.tobytes())
        for mini_batch in self.mini_batches:
            state.update(f"/{mini_batch.num_rounds}x{mini_batch.num_ranks}/".encode())
            state.update(mini_batch.rows.tobytes())
            state.update(mini_batch.offsets.tobytes())
            state.update(mini_batch.image_rounds.tobytes())
        return state.hexdigest()


def plan_step(manifest: BatchManifest, layout: Layout) -> StepPlan:
    """Who trains what. Raises `PlanError` for a batch, or a mini-batch of it, without a trained token."""
    _check_trainable(manifest, layout)
    lengths = np.minimum(manifest.columns.lengths.numpy(), layout.seq_len).astype(np.int64)
    mini_batch_of = assign_mini_batches(manifest.columns.trajectories.numpy(), lengths, layout.num_mini_batches)
    units, num_units = units_of(manifest.columns, layout.weighting)
    return StepPlan(
        step=manifest.step,
        batch_digest=manifest.digest,
        env_names=manifest.env_names,
        seq_len=layout.seq_len,
        lengths=lengths,
        mini_batches=tuple(
            _plan_mini_batch(np.flatnonzero(mini_batch_of == index), lengths, manifest, layout)
            for index in range(layout.num_mini_batches)
        ),
        visits=order_of_visits(layout, manifest.step),
        units=units,
        num_units=num_units,
    )


def order_of_visits(layout: Layout, step: int) -> tuple[int, ...]:
    """The mini-batches in order, and again for each further epoch, in an order that seed, step and epoch decide."""
    first = range(layout.num_mini_batches)
    shuffled = (
        np.random.default_rng((layout.seed, step, epoch)).permutation(layout.num_mini_batches).tolist()
        for epoch in range(1, layout.num_epochs)
    )
    return (*first, *itertools.chain.from_iterable(shuffled))


def assign_mini_batches(trajectories: IntArray, lengths: IntArray, num_mini_batches: int) -> IntArray:
    """Mini-batch of each sample: whole trajectories, in order of first appearance, about equal in tokens, none empty
    unless there are fewer trajectories than mini-batches."""
    _, first_row, inverse = np.unique(trajectories, return_index=True, return_inverse=True)
    order = np.argsort(first_row, kind="stable")
    tokens = np.bincount(inverse, weights=lengths)[order]
    ideal = ((np.cumsum(tokens) - tokens / 2) * num_mini_batches // tokens.sum()).astype(np.int64)
    mini_batch_of_trajectory = np.empty(len(order), dtype=np.int64)
    mini_batch_of_trajectory[order] = _without_gaps(ideal, num_mini_batches)
    return mini_batch_of_trajectory[inverse]


def _without_gaps(ideal: IntArray, num_mini_batches: int) -> IntArray:
    """The ascending `ideal`, changed where a trajectory longer than a mini-batch would skip one: from 0, up by at most
    one, and early enough that every mini-batch gets a trajectory."""
    places = np.arange(len(ideal))
    ideal = ideal.copy()
    ideal[0] = 0
    no_skips = places + np.minimum.accumulate(ideal - places)
    return np.maximum(no_skips, np.maximum(num_mini_batches - len(ideal) + places, 0))


def _check_trainable(manifest: BatchManifest, layout: Layout) -> None:
    if manifest.num_samples == 0:
        raise PlanError(f"batch {manifest.step} has no samples: the orchestrator must not cut an empty batch")
    if layout.sharing is RowSharing.TEXT and (manifest.columns.modalities.numpy() == IMAGE).any():
        raise PlanError(f"batch {manifest.step} has image samples, but the model that is trained cannot see")


def _plan_mini_batch(rows: IntArray, lengths: IntArray, manifest: BatchManifest, layout: Layout) -> MiniBatchPlan:
    counts = _count(rows, lengths, manifest)
    if counts.num_loss_tokens == 0:
        raise PlanError(
            f"batch {manifest.step} gives a mini-batch of {counts.num_samples} samples without a trained token: the "
            f"orchestrator sent samples without any, or too few trajectories for {layout.num_mini_batches} steps"
        )
    has_image = manifest.columns.modalities.numpy()[rows] == IMAGE
    slots, num_rounds = _slots(lengths[rows], has_image, layout)
    image_rounds = np.zeros(num_rounds, dtype=np.bool_)
    image_rounds[slots[has_image] % num_rounds] = True
    order = np.argsort(slots, kind="stable")
    offsets = np.zeros(num_rounds * layout.dp_size + 1, dtype=np.int64)
    np.cumsum(np.bincount(slots, minlength=num_rounds * layout.dp_size), out=offsets[1:])
    return MiniBatchPlan(num_rounds, layout.dp_size, rows[order], offsets, counts, image_rounds)


def _slots(lengths: IntArray, has_image: npt.NDArray[np.bool_], layout: Layout) -> tuple[IntArray, int]:
    """(slot of each sample, number of rounds); slot `rank * num_rounds + round`."""
    if layout.sharing is RowSharing.MODALITY and has_image.any() and not has_image.all():
        return _slots_by_modality(lengths, has_image, layout)
    bin_of, num_rounds = _pack(lengths, layout)
    return _schedule(bin_of, lengths, has_image, num_rounds, layout.dp_size)[bin_of], num_rounds


def _slots_by_modality(lengths: IntArray, has_image: npt.NDArray[np.bool_], layout: Layout) -> tuple[IntArray, int]:
    """Rounds of images on all ranks, then rounds of text on all ranks."""
    rounds, ranks = np.empty_like(lengths), np.empty_like(lengths)
    num_rounds = 0
    for members in (has_image, ~has_image):
        slots, num_own = _slots(lengths[members], has_image[members], layout)
        ranks[members], rounds[members] = slots // num_own, num_rounds + slots % num_own
        num_rounds += num_own
    return ranks * num_rounds + rounds, num_rounds


def _pack(lengths: IntArray, layout: Layout) -> tuple[IntArray, int]:
    """(bin of each sample, number of rounds): tight bins, or, if rounding up to whole rounds leaves room, even ones."""
    cap = layout.micro_batch_tokens
    bin_of, num_bins = best_fit_decreasing(lengths, cap)
    num_rounds = -(-num_bins // layout.dp_size)
    num_slots = num_rounds * layout.dp_size
    if num_bins < num_slots and lengths.sum() < WORTH_SPREADING * num_slots * cap:
        spread = spread_by_cost(lengths, num_slots, cap)
        bin_of = bin_of if spread is None else spread
    return bin_of, num_rounds


def _schedule(
    bin_of: IntArray, lengths: IntArray, has_image: npt.NDArray[np.bool_], num_rounds: int, num_ranks: int
) -> IntArray:
    """Slot (rank * num_rounds + round) of each bin: dearest bins first, `num_ranks` of like cost to a round.

    Bins with images come before all others, so that at most one round has both kinds. Every other round is dealt in
    reverse, so that no rank gets the dearest bin of every round.
    """
    costs = np.bincount(bin_of, weights=compute_cost(lengths), minlength=num_rounds * num_ranks)
    num_images = np.bincount(bin_of, weights=has_image, minlength=len(costs))
    place = np.empty(len(costs), dtype=np.int64)
    place[np.lexsort((-costs, num_images == 0))] = np.arange(len(costs))
    rounds, seats = place // num_ranks, place % num_ranks
    ranks = np.where(rounds % 2 == 0, seats, num_ranks - 1 - seats)
    return ranks * num_rounds + rounds


def _count(rows: IntArray, lengths: IntArray, manifest: BatchManifest) -> GlobalCounts:
    return GlobalCounts(
        num_samples=len(rows),
        num_trajectories=len(np.unique(manifest.columns.trajectories.numpy()[rows])),
        num_groups=len(np.unique(manifest.columns.groups.numpy()[rows])),
        num_tokens=int(lengths[rows].sum()),
        num_loss_tokens=int(manifest.columns.loss_tokens.numpy()[rows].sum()),
    )
