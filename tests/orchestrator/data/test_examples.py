"""The order of examples: resumable, seeded, and true to its ratios."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.data.examples import BLOCK, EnvShare, ExampleOrder, slots_per_block
from orchestrator.data.seeds import permutation, rollout_seed

MIX = (EnvShare("copy", 7, 3.0), EnvShare("reverse", 130, 1.0), EnvShare("count", 1, 0.001))
GOLDEN = [("reverse", 53, 0), ("copy", 0, 0), ("reverse", 78, 1), ("copy", 0, 107), ("copy", 0, 5810)]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), start=st.integers(0, 5000), length=st.integers(1, 60))
def test_a_resumed_order_continues_where_it_stopped(seed: int, start: int, length: int) -> None:
    whole = ExampleOrder(seed, MIX)
    for seq in range(0, start, 97):
        whole.visit(seq)  # another past, other cached permutations
    resumed = ExampleOrder(seed, MIX)
    assert [whole.visit(seq) for seq in range(start, start + length)] == [
        resumed.visit(seq) for seq in range(start, start + length)
    ]


def test_no_visit_comes_twice_and_every_epoch_is_complete() -> None:
    order = ExampleOrder(5, MIX)
    visits = [order.visit(seq) for seq in range(3 * BLOCK)]
    keys = [(visit.env_name, visit.example_index, visit.attempt) for visit in visits]
    assert len(set(keys)) == len(keys)
    first_epoch = {visit.example_index for visit in visits if visit.env_name == "reverse" and visit.attempt == 0}
    assert first_epoch == set(range(130))


def test_ratios_are_met_in_every_block() -> None:
    order = ExampleOrder(1, MIX)
    for block in range(3):
        counts = Counter(order.visit(block * BLOCK + offset).env_name for offset in range(BLOCK))
        assert counts["copy"] == pytest.approx(750, abs=3)
        assert counts["reverse"] == pytest.approx(250, abs=3)
        assert counts["count"] >= 1, "a small ratio is not rounded away"


def test_epochs_and_seeds_have_their_own_order() -> None:
    share = (EnvShare("copy", 50, 1.0),)
    epochs = [[ExampleOrder(0, share).visit(epoch * 50 + i).example_index for i in range(50)] for epoch in range(2)]
    other_seed = [ExampleOrder(1, share).visit(i).example_index for i in range(50)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(other_seed) == list(range(50))
    assert epochs[0] != epochs[1]
    assert epochs[0] != other_seed


def test_an_environment_without_examples_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'empty' has no examples"):
        ExampleOrder(0, (EnvShare("empty", 0, 1.0),))


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=20))
def test_slots_fill_a_block_exactly(ratios: list[float]) -> None:
    slots = slots_per_block(ratios)
    assert sum(slots) == BLOCK
    assert min(slots) >= 1
    for share, ratio in zip(slots, ratios, strict=True):
        assert share == pytest.approx(BLOCK * ratio / sum(ratios), abs=len(ratios) + 2)


@given(st.integers(1, 500), st.integers())
def test_a_permutation_holds_every_index_once(size: int, key: int) -> None:
    assert sorted(permutation(size, key)) == list(range(size))


def test_seeds_do_not_move_between_versions_of_anything() -> None:
    # Golden numbers: a change here breaks the resumption of every existing run.
    assert rollout_seed(0, "copy", "1", 0, 0) == 43080238988491
    assert permutation(8, "golden").tolist() == [5, 6, 1, 7, 4, 0, 3, 2]


def test_seeds_differ_between_rollouts_and_fit_into_json() -> None:
    seeds = {
        rollout_seed(0, "copy", str(example), attempt, index)
        for example in range(20)
        for attempt in range(3)
        for index in range(8)
    }
    assert len(seeds) == 20 * 3 * 8
    assert max(seeds) < 2**53 - 1000


def test_the_order_of_a_running_experiment_never_changes() -> None:
    visits = [ExampleOrder(3, MIX).visit(seq) for seq in (0, 1, 999, 1000, 54_321)]
    assert [(visit.env_name, visit.example_index, visit.attempt) for visit in visits] == GOLDEN
