"""The planner beside next-fit, linear first-fit-decreasing and padding, on the same lengths in the same run.

    python benchmarks/packing.py [--out benchmarks/results/packing.json]

Lengths are lognormal (median 900, sigma 0.9), cut to 8,192, the cap of a micro batch. `fill` is trained tokens over
tokens of all micro batches at the cap (or, padded, of all rows). `lock_step` is the time of a step over the ideal,
with ranks that wait for each other after every micro batch: sum over rounds of the dearest micro batch, over the total
cost divided by the ranks. Times are CPU seconds of one core, best of several repeats. `lock_step` is the mean over
several draws of lengths, and the worst of them.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trainer.bins import IntArray, best_fit_decreasing, compute_cost
from trainer.layout import Layout
from trainer.plan import MiniBatchPlan, plan_step
from transport.manifest import SCHEMA_VERSION, TEXT, BatchManifest, SampleColumns
from transport.tensor import EncodedTensor

CAP = 8192
REPEATS = 9
DRAWS = 5
SIZES = ((256, 8), (512, 8), (2048, 32), (4096, 8))
"""(samples, ranks)."""

Packer = Callable[[IntArray], list[list[int]]]
Figures = dict[str, float]


def draw_lengths(num_samples: int, seed: int) -> IntArray:
    """Lengths of one batch."""
    drawn = np.random.default_rng(seed).lognormal(np.log(900), 0.9, num_samples)
    return drawn.clip(2, CAP).astype(np.int64)


def next_fit(lengths: IntArray) -> list[list[int]]:
    """Samples in order of arrival; a new bin as soon as one does not fit."""
    bins: list[list[int]] = [[]]
    room = CAP
    for length in lengths.tolist():
        if length > room:
            bins.append([])
            room = CAP
        bins[-1].append(length)
        room -= length
    return bins


def first_fit_decreasing(lengths: IntArray) -> list[list[int]]:
    """The longest first, into the first bin with room, looking at every bin."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        place = next((index for index, room in enumerate(rooms) if room >= length), None)
        if place is None:
            place = len(bins)
            bins.append([])
            rooms.append(CAP)
        bins[place].append(length)
        rooms[place] -= length
    return bins


def padded(lengths: IntArray) -> list[list[int]]:
    """As many samples as fit, in order of arrival, each padded to the longest of its micro batch."""
    bins: list[list[int]] = [[]]
    for length in lengths.tolist():
        if max([length, *bins[-1]]) * (len(bins[-1]) + 1) > CAP:
            bins.append([])
        bins[-1].append(length)
    return [[max(held)] * len(held) for held in bins]


def lock_step(bin_costs: IntArray, num_ranks: int, ideal: float) -> float:
    """Time of rounds of `num_ranks` bins, in the order given, over the ideal."""
    rounds = np.zeros(-(-len(bin_costs) // num_ranks) * num_ranks)
    rounds[: len(bin_costs)] = bin_costs
    return float(rounds.reshape(-1, num_ranks).max(axis=1).sum() / (ideal / num_ranks))


def cpu_ms(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Best CPU time of one call."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return 1e3 * min(times)


def measure_packer(pack: Packer, num_samples: int, num_ranks: int) -> Figures:
    """One of the alternatives: its bins, dealt to the ranks in the order they come."""
    fills, costs = [], []
    for seed in range(DRAWS):
        lengths = draw_lengths(num_samples, seed)
        bins = pack(lengths)
        held = [np.array(part) for part in bins]
        tokens = sum(int(part.sum()) for part in held) if pack is padded else len(bins) * CAP
        fills.append(lengths.sum() / tokens)
        bin_costs = np.array([compute_cost(part).sum() for part in held])
        costs.append(lock_step(bin_costs, num_ranks, float(compute_cost(lengths).sum())))
    lengths = draw_lengths(num_samples, 0)
    return _figures(fills, costs, cpu_ms(lambda: pack(lengths), 3))


def measure_plan(num_samples: int, num_ranks: int) -> Figures:
    """Ours: the whole of `plan_step`, its digest included."""
    layout = Layout(0, num_ranks, CAP, CAP)
    fills, costs = [], []
    for seed in range(DRAWS):
        lengths = draw_lengths(num_samples, seed)
        _, num_bins = best_fit_decreasing(lengths, CAP)
        fills.append(lengths.sum() / (num_bins * CAP))
        mini_batch = plan_step(make_manifest(lengths), layout).mini_batches[0]
        costs.append(lock_step(plan_costs(mini_batch, lengths), num_ranks, float(compute_cost(lengths).sum())))
    manifest = make_manifest(draw_lengths(num_samples, 0))
    return _figures(fills, costs, cpu_ms(lambda: plan_step(manifest, layout).digest))


def plan_costs(mini_batch: MiniBatchPlan, lengths: IntArray) -> IntArray:
    """Cost of each micro batch, round by round."""
    ranks, rounds = range(mini_batch.num_ranks), range(mini_batch.num_rounds)
    rows = (mini_batch.micro_batch_rows(rank, index) for index in rounds for rank in ranks)
    return np.array([compute_cost(lengths[held]).sum() for held in rows])


def make_manifest(lengths: IntArray) -> BatchManifest:
    """A manifest of samples that do not exist: all that planning needs."""
    num_samples = len(lengths)
    numbers = EncodedTensor.of(np.arange(num_samples, dtype=np.int32))
    zeros = EncodedTensor.of(np.zeros(num_samples, dtype=np.int32))
    columns = SampleColumns(
        lengths=EncodedTensor.of(lengths.astype(np.int32)),
        loss_tokens=EncodedTensor.of((lengths // 2).astype(np.int32)),
        env_ids=zeros,
        groups=EncodedTensor.of((np.arange(num_samples) // 8).astype(np.int32)),
        trajectories=numbers,
        modalities=EncodedTensor.of(np.full(num_samples, TEXT, dtype=np.uint8)),
        num_bytes=EncodedTensor.of(np.ones(num_samples, dtype=np.int64)),
        oldest_versions=zeros,
        frame_hashes=EncodedTensor.of(np.arange(num_samples, dtype=np.uint64)),
    )
    return BatchManifest(
        schema_version=SCHEMA_VERSION, run_id="bench", step=1, digest="", env_names=("bench",), columns=columns
    )


def _figures(fills: list[float], costs: list[float], milliseconds: float) -> Figures:
    return {
        "fill": round(float(np.mean(fills)), 4),
        "lock_step": round(float(np.mean(costs)), 3),
        "lock_step_worst": round(max(costs), 3),
        "ms": round(milliseconds, 2),
    }


def measure() -> dict[str, dict[str, Figures]]:
    """Figures by size and packer."""
    packers: dict[str, Packer] = {
        "next_fit": next_fit,
        "first_fit_decreasing_linear": first_fit_decreasing,
        "padded": padded,
    }
    results = {}
    for num_samples, num_ranks in SIZES:
        size = f"{num_samples} samples, {num_ranks} ranks"
        others = {name: measure_packer(pack, num_samples, num_ranks) for name, pack in packers.items()}
        results[size] = {"plan_step": measure_plan(num_samples, num_ranks)} | others
    return results


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "packing.json")
    out: Path = parser.parse_args().out
    results = measure()
    print(f"{'':24}{'':30}{'fill':>8}{'lock-step':>11}{'worst':>8}{'ms':>9}")
    for size, packers in results.items():
        for name, figures in packers.items():
            print(
                f"{size:<24}{name:<30}{figures['fill']:>8.3f}{figures['lock_step']:>11.3f}"
                f"{figures['lock_step_worst']:>8.3f}{figures['ms']:>9.2f}"
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    measured = {"machine": platform.machine(), "python": platform.python_version(), "results": results}
    out.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
