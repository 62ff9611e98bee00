"""The slot table stays dense, and rows keep their own numbers when they move.

Every slot is prefilled exactly once, by computing or by copying, in bounded rectangles.

Sampling is exact: right distribution, right log probabilities, one draw per token, by seed and index alone.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference.api.generation import Job
from inference.torch_engine.decoder import counter_uniforms, sample, stream_seed
from inference.torch_engine.slots import EngineSequence, SlotTable, pad_right, plan_prefill
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


def draw(logits: torch.Tensor, uniform: float, temperature: float = 1.0, top_p: float = 1.0) -> tuple[int, float]:
    sampled = sample(logits[None], np.float32([temperature]), np.float32([top_p]), np.float64([uniform]))
    return int(sampled.tokens[0]), float(sampled.logprobs[0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_tempered_probabilities(temperature: float) -> None:
    logits, num = torch.randn(9, generator=torch.Generator().manual_seed(0)), 20_000
    uniform = (np.arange(num) + 0.5) / num  # evenly spread: frequencies are exact up to 1 / num
    sampled = sample(logits.expand(num, 9), np.full(num, temperature, np.float32), np.ones(num, np.float32), uniform)
    frequencies = torch.bincount(sampled.tokens, minlength=9) / num
    torch.testing.assert_close(frequencies, (logits / temperature).softmax(0), atol=2 / num, rtol=0)


def test_logprob_is_of_the_tempered_distribution_in_float32() -> None:
    logits = torch.tensor([1.0, 3.0, -2.0], dtype=torch.bfloat16)
    token, logprob = draw(logits, 0.5, temperature=0.7)
    assert logprob == pytest.approx(float((logits.float() / 0.7).log_softmax(0)[token]), abs=1e-6)


def test_temperature_zero_is_greedy_and_reports_the_untempered_logprob() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0])
    for uniform in (0.0, 0.5, 0.999999):
        token, logprob = draw(logits, uniform, temperature=0.0)
        assert token == 1
        assert logprob == pytest.approx(float(logits.log_softmax(0)[1]))


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    assert {draw(logits, uniform)[0] for uniform in np.linspace(0, 1 - 2**-48, 101)} == {1, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    spread = np.linspace(0, 1 - 2**-48, 201)
    assert {draw(logits, uniform, top_p=0.35)[0] for uniform in spread} == {1}
    assert {draw(logits, uniform, top_p=0.6)[0] for uniform in spread} == {1, 3}
    assert {draw(logits, uniform, top_p=0.95)[0] for uniform in spread} == {0, 1, 2, 3}
    assert draw(logits, 0.99, top_p=0.6)[1] == pytest.approx(float(torch.tensor(0.3).log()), abs=1e-6)


def test_rows_do_not_influence_each_other() -> None:
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(1))
    temperature = np.float32([1.0, 0.0, 0.5, 1.0, 2.0, 1.0])
    top_p = np.float32([1.0, 1.0, 0.5, 0.1, 1.0, 0.9])
    uniform = np.linspace(0.05, 0.95, 6)
    together = sample(logits, temperature, top_p, uniform)
    for row in range(6):
        alone = draw(logits[row], float(uniform[row]), float(temperature[row]), float(top_p[row]))
        assert alone == (int(together.tokens[row]), pytest.approx(float(together.logprobs[row])))


def test_nan_gives_a_valid_token_and_a_logprob_that_shows_it() -> None:
    token, logprob = draw(torch.tensor([0.0, torch.nan, 1.0]), 0.5)
    assert 0 <= token < 3
    assert np.isnan(logprob)


def stream(seed: int, num: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return counter_uniforms(np.full(num, seed, dtype=np.uint64), np.arange(num, dtype=np.uint64))


def test_draw_depends_on_nothing_but_seed_and_index() -> None:
    together = counter_uniforms(np.array([3, 9, 3], dtype=np.uint64), np.array([5, 5, 6], dtype=np.uint64))
    np.testing.assert_array_equal(together, [stream(3, 7)[5], stream(9, 7)[5], stream(3, 7)[6]])


def test_draws_are_uniform_and_below_one() -> None:
    draws = stream(0, 100_000)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 100  # chi-square, 49 degrees of freedom: p < 2e-5 above


def test_neighbouring_seeds_are_independent() -> None:
    first = counter_uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, dtype=np.uint64))
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(stream(1, 20_000), stream(2, 20_000))[0, 1]) < 0.03


def test_largest_seed_is_accepted_without_a_warning() -> None:
    assert 0 <= stream(2**64 - 1, 3)[2] < 1


def test_requests_without_seed_get_different_ones_that_depend_on_the_servers() -> None:
    seeds = {stream_seed(0, number) for number in range(1000)}
    assert len(seeds) == 1000
    assert stream_seed(0, 5) == stream_seed(0, 5) != stream_seed(1, 5)
