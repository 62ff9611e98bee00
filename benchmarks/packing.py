"""The planner: how full micro batches are, how long ranks wait for each other, and what planning costs.

    python -m benchmarks.packing

Lengths are lognormal (median 900, sigma 0.9), cut to 8,192, the cap of a micro batch. `fill` is trained tokens over
tokens of all micro batches at the cap. `lock_step` is the time of a step over the ideal, with ranks that wait for each
other after every micro batch: sum over rounds of the dearest micro batch, over the total cost divided by the ranks;
the mean over several draws of lengths, and the worst of them. `ms` is the best CPU time of `plan_step`.
"""

import numpy as np

from benchmarks import harness
from trainer.arrays import IntArray
from trainer.planning.layout import Layout
from trainer.planning.plan import MiniBatchPlan, best_fit_decreasing, compute_cost, plan_step
from transport.wire.manifest import SCHEMA_VERSION, TEXT, BatchManifest, SampleColumns
from transport.wire.sample import EncodedTensor

CAP = 8192
REPEATS = 9
DRAWS = 5
SIZES = ((256, 8), (512, 8), (2048, 32), (4096, 8))
"""(samples, ranks)."""


def draw_lengths(num_samples: int, seed: int) -> IntArray:
    """Lengths of one batch."""
    drawn = np.random.default_rng(seed).lognormal(np.log(900), 0.9, num_samples)
    return drawn.clip(2, CAP).astype(np.int64)


def lock_step(mini_batch: MiniBatchPlan, lengths: IntArray) -> float:
    """Time of all rounds over the ideal."""
    ranks, rounds = range(mini_batch.num_ranks), range(mini_batch.num_rounds)
    dearest = [
        max(compute_cost(lengths[mini_batch.micro_batch_rows(rank, index)]).sum() for rank in ranks) for index in rounds
    ]
    return float(sum(dearest) / (compute_cost(lengths).sum() / mini_batch.num_ranks))


def make_manifest(lengths: IntArray) -> BatchManifest:
    """A manifest of samples that do not exist: all that planning needs."""
    num_samples = len(lengths)
    zeros = EncodedTensor.of(np.zeros(num_samples, dtype=np.int32))
    columns = SampleColumns(
        lengths=EncodedTensor.of(lengths.astype(np.int32)),
        loss_tokens=EncodedTensor.of((lengths // 2).astype(np.int32)),
        env_ids=zeros,
        groups=EncodedTensor.of((np.arange(num_samples) // 8).astype(np.int32)),
        trajectories=EncodedTensor.of(np.arange(num_samples, dtype=np.int32)),
        modalities=EncodedTensor.of(np.full(num_samples, TEXT, dtype=np.uint8)),
        num_bytes=EncodedTensor.of(np.ones(num_samples, dtype=np.int64)),
        oldest_versions=zeros,
        frame_hashes=EncodedTensor.of(np.arange(num_samples, dtype=np.uint64)),
    )
    return BatchManifest(
        schema_version=SCHEMA_VERSION, run_id="bench", step=1, digest="", env_names=("bench",), columns=columns
    )


def measure_plan(num_samples: int, num_ranks: int) -> dict[str, float]:
    """The whole of `plan_step`, its digest included."""
    layout = Layout(0, num_ranks, CAP, CAP)
    fills, waits = [], []
    for seed in range(DRAWS):
        lengths = draw_lengths(num_samples, seed)
        _, num_bins = best_fit_decreasing(lengths, CAP)
        fills.append(lengths.sum() / (num_bins * CAP))
        waits.append(lock_step(plan_step(make_manifest(lengths), layout).mini_batches[0], lengths))
    manifest = make_manifest(draw_lengths(num_samples, 0))
    return {
        "fill": round(float(np.mean(fills)), 4),
        "lock_step": round(float(np.mean(waits)), 3),
        "lock_step_worst": round(max(waits), 3),
        "ms": round(1e3 * harness.best_s(lambda: plan_step(manifest, layout).digest, REPEATS), 2),
    }


def measure() -> dict[str, object]:
    """Figures by size."""
    return {"results": {f"{samples} samples, {ranks} ranks": measure_plan(samples, ranks) for samples, ranks in SIZES}}


if __name__ == "__main__":
    harness.main("packing", __doc__, measure)
