"""Pauses between tries: they double, end at a bound, and are spread where the caller asks for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.backoff import Backoff


def test_pauses_double_until_the_longest() -> None:
    backoff = Backoff(0.2, 10.0)
    assert [backoff.pause_s(n) for n in range(1, 9)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_the_first_pause_is_not_longer_than_the_longest() -> None:
    assert Backoff(5.0, 2.0).pause_s(1) == 2.0


def test_pause_after_thousands_of_failures_is_still_the_longest() -> None:
    assert Backoff(0.05, 2.0).pause_s(100_000) == 2.0


@pytest.mark.parametrize(("draw", "seconds"), [(min, 0.2), (max, 0.6)])
def test_factor_is_drawn_between_the_bounds_of_the_jitter(draw, seconds) -> None:
    pause_s = Backoff(0.1, 2.0, jitter=(0.5, 1.5)).pause_s(3, uniform=lambda low, high: draw(low, high))
    assert pause_s == pytest.approx(seconds)


@given(num_failures=st.integers(1, 5000))
def test_jittered_pauses_stay_within_their_bounds(num_failures: int) -> None:
    nominal_s = Backoff(0.2, 10.0).pause_s(num_failures)
    assert 0.5 * nominal_s <= Backoff(0.2, 10.0, jitter=(0.5, 1.0)).pause_s(num_failures) <= nominal_s


def test_clients_that_fail_together_pause_for_different_times() -> None:
    backoff = Backoff(0.2, 10.0, jitter=(0.0, 1.0))
    assert len({backoff.pause_s(1) for _ in range(100)}) > 1
