"""Sampling is exact: right distribution, right log probabilities, one draw per token, by seed and index alone."""

import numpy as np
import pytest
import torch

from inference.torch_engine.sampling import counter_uniforms, sample, stream_seed


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
