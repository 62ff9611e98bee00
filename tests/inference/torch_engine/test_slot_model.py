"""Every slot is prefilled exactly once, by computing or by copying, in bounded rectangles."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inference.torch_engine.slot_model import pad_right, plan_prefill

rows = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=20)


@given(rows, st.integers(1, 30))
def test_each_slot_is_computed_or_copied_once_and_only_from_its_equal(tokens: list[list[int]], cap: int) -> None:
    by_slot = {slot: np.array(row, dtype=np.int32) for slot, row in enumerate(tokens)}
    plan = plan_prefill(by_slot, cap)
    computed = [slot for batch in plan.batches for slot in batch]
    copied = [slot for targets in plan.copies.values() for slot in targets]
    assert sorted(computed + copied) == [slot for slot, row in enumerate(tokens) if row]
    for source, targets in plan.copies.items():
        assert source in computed
        assert all(tokens[target] == tokens[source] for target in targets)


@given(rows, st.integers(1, 30))
def test_no_padded_batch_is_above_the_cap_unless_it_is_one_row(tokens: list[list[int]], cap: int) -> None:
    plan = plan_prefill({slot: np.array(row, dtype=np.int32) for slot, row in enumerate(tokens)}, cap)
    for batch in plan.batches:
        assert len(batch) == 1 or len(batch) * max(len(tokens[slot]) for slot in batch) <= cap


def test_padding_is_on_the_right() -> None:
    padded = pad_right([np.array([1, 2, 3], dtype=np.int32), np.array([4], dtype=np.int32)])
    assert padded.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert padded.dtype == np.int32
