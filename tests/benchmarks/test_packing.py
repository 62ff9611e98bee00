"""The packing benchmark compares like with like: every packer holds every sample, under the same cap."""

import numpy as np
import pytest

from benchmarks.packing import (
    CAP,
    draw_lengths,
    first_fit_decreasing,
    lock_step,
    make_manifest,
    measure_plan,
    next_fit,
    padded,
)
from trainer.layout import Layout
from trainer.plan import plan_step


@pytest.mark.parametrize("pack", [next_fit, first_fit_decreasing])
def test_packers_hold_every_sample_once_under_the_cap(pack) -> None:  # type: ignore[no-untyped-def]
    lengths = draw_lengths(300, seed=1)
    bins = pack(lengths)
    assert sorted(length for held in bins for length in held) == sorted(lengths.tolist())
    assert max(sum(held) for held in bins) <= CAP


def test_padding_counts_the_longest_of_a_micro_batch_for_each() -> None:
    assert padded(np.array([10, 4000, 4000, 8192, 5])) == [[4000, 4000], [4000], [8192], [5]]


def test_lock_step_waits_for_the_dearest_of_each_round() -> None:
    assert lock_step(np.array([4, 2, 1, 1, 3]), num_ranks=2, ideal=11.0) == pytest.approx((4 + 1 + 3) / 5.5)


def test_the_figures_that_were_asked_for_are_reached() -> None:
    assert measure_plan(512, 8)["fill"] >= 0.99
    assert measure_plan(256, 8)["lock_step_worst"] <= 1.2


def test_the_manifest_can_be_planned() -> None:
    lengths = draw_lengths(64, seed=0)
    assert plan_step(make_manifest(lengths), Layout(0, 4, CAP, CAP)).mini_batches[0].counts.num_tokens == lengths.sum()
