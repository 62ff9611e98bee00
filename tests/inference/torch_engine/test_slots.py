"""The slot table stays dense, and rows keep their own numbers when they move."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inference.api.generation import Job
from inference.torch_engine.slots import EngineSequence, SlotTable
from transport.wire.sample import VersionSpan


def sequence(key: int, length: int = 2) -> EngineSequence:
    prompt = np.full(length, key, dtype=np.int32)
    job = Job(prompt=prompt, max_tokens=9, temperature=key + 0.5, top_p=1 / (key + 1))
    return EngineSequence(key=key, job=job, seed=key, stop_ids=frozenset(), limit=20, switches=[(0, 0)])


def assert_row_is_whole(table: SlotTable, slot: int) -> None:
    key = table.sequences[slot].key
    assert (table.tokens[slot, : table.lengths[slot]] == key).all()
    assert table.temperatures[slot] == np.float32(key + 0.5)
    assert table.top_ps[slot] == np.float32(1 / (key + 1))
    assert table.seeds[slot] == key


@given(st.integers(1, 12), st.data())
def test_removing_any_rows_keeps_the_others_whole_and_dense(num: int, data: st.DataObject) -> None:
    table = SlotTable(12, 20)
    for key in range(num):
        table.add(sequence(key))
    table.append(np.arange(num, dtype=np.int32), np.zeros(num, dtype=np.float32))
    gone = data.draw(st.lists(st.integers(0, num - 1), unique=True))
    moves = table.remove(gone)
    assert sorted(running.key for running in table.sequences) == sorted(set(range(num)) - set(gone))
    assert set(moves.targets) <= set(gone)
    assert not set(moves.sources) & set(moves.targets)
    for slot in range(table.num_running):
        assert_row_is_whole(table, slot)


def test_completion_is_a_copy_of_what_was_sampled() -> None:
    table = SlotTable(2, 20)
    slot = table.add(sequence(7, length=3))
    for token in (4, 5):
        table.append(np.array([token], dtype=np.int32), np.array([-token], dtype=np.float32))
    completion = table.completion(slot, "length")
    table.remove([slot])
    table.add(sequence(9, length=10))
    assert completion.token_ids.tolist() == [4, 5]
    assert completion.logprobs.tolist() == [-4, -5]
    assert completion.versions == (VersionSpan(0, 0, 2),)


def test_spans_leave_out_versions_that_sampled_nothing() -> None:
    switched = sequence(1)
    switched.switches += [(1, 0), (2, 3), (3, 3), (4, 5)]
    assert switched.spans(5) == (VersionSpan(1, 0, 3), VersionSpan(3, 3, 5))
    assert switched.spans(8)[-1] == VersionSpan(4, 5, 8)
