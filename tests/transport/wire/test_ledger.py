"""`CompletedPositions`, a cursor with holes, against a plain set."""

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from transport.wire.ledger import CompletedPositions

seqs = st.lists(st.lists(st.integers(0, 60), max_size=12), max_size=6)


@given(batches=seqs, probe=st.integers(0, 70))
def test_it_is_a_set_of_positions(batches: list[list[int]], probe: int) -> None:
    done, model = CompletedPositions(), set[int]()
    for batch in batches:
        done = done.add(batch)
        model |= set(batch)
    assert {seq for seq in range(70) if seq in done} == model
    assert done.next_open(probe) == next(seq for seq in range(probe, 200) if seq not in model)
    assert done.cursor == next(seq for seq in range(200) if seq not in model)


@given(batches=seqs)
def test_its_spans_are_sorted_apart_and_beyond_the_cursor(batches: list[list[int]]) -> None:
    done = CompletedPositions()
    for batch in batches:
        done = done.add(batch)
    ends = [(0, done.cursor), *done.beyond]
    assert all(end < first for (_, end), (first, _) in itertools.pairwise(ends))
    assert all(first < end for first, end in done.beyond)


@given(batches=seqs)
def test_the_order_of_adding_does_not_matter(batches: list[list[int]]) -> None:
    one_by_one = CompletedPositions()
    for batch in reversed(batches):
        for seq in batch:
            one_by_one = one_by_one.add([seq])
    assert one_by_one == CompletedPositions().add(seq for batch in batches for seq in batch)


def test_it_survives_json() -> None:
    done = CompletedPositions(3, ((5, 7), (9, 10)))
    assert msgspec.json.decode(msgspec.json.encode(done), type=CompletedPositions) == done
