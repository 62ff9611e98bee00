"""Draws are a function of seed and index, and look uniform."""

import numpy as np

from inference.torch_engine.sampling import counter_uniforms, stream_seed


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
