import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.engines.replica import FIRST_REST_S, LONGEST_REST_S, Replica, least_loaded
from orchestrator.engines.retry import LONGEST_WAIT_S, backoff_s, parse_retry_after


def test_request_goes_to_the_replica_with_the_least_in_flight() -> None:
    replicas = [Replica("a", num_in_flight=3), Replica("b", num_in_flight=1), Replica("c", num_in_flight=2)]
    assert least_loaded(replicas, now=0).url == "b"


def test_replica_that_failed_rests_while_others_are_ready() -> None:
    failed, busy = Replica("failed"), Replica("busy", num_in_flight=9)
    failed.failed(now=100)
    assert least_loaded([failed, busy], now=100).url == "busy"
    assert least_loaded([failed, busy], now=100 + FIRST_REST_S).url == "failed"


def test_resting_replica_is_used_when_all_rest() -> None:
    only = Replica("only")
    only.failed(now=100)
    assert least_loaded([only], now=100) is only


def test_rest_grows_with_failures_in_a_row_and_ends_with_a_success() -> None:
    replica = Replica("a")
    rests = []
    for _ in range(8):
        replica.failed(now=0)
        rests.append(replica.rests_until)
    assert rests[:3] == [FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S]
    assert rests[-1] == LONGEST_REST_S
    replica.succeeded()
    assert (replica.rests_until, replica.num_failures) == (0, 0)


def test_request_is_counted_while_in_flight_also_when_it_fails() -> None:
    replica = Replica("a")
    counts = []

    def fail() -> None:
        with replica.busy():
            counts.append(replica.num_in_flight)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert counts == [1]
    assert replica.num_in_flight == 0


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, None), ("2", 2.0), ("0.5", 0.5), ("-1", None), ("inf", None), ("Wed, 21 Oct 2015 07:28:00 GMT", None)],
)
def test_retry_after_header(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header) == seconds


@given(attempt=st.integers(1, 40), retry_after=st.none() | st.floats(0, 1e6), jitter=st.floats(0, 0.999))
def test_backoff_is_bounded_and_honours_retry_after(attempt: int, retry_after: float | None, jitter: float) -> None:
    seconds = backoff_s(attempt, retry_after, jitter)
    assert 0 <= seconds <= 1.5 * LONGEST_WAIT_S
    if retry_after is not None:
        assert seconds >= min(retry_after, LONGEST_WAIT_S)


def test_backoff_grows_and_is_jittered() -> None:
    assert backoff_s(3, None, 0.0) > backoff_s(1, None, 0.0)
    assert backoff_s(1, None, 0.9) > backoff_s(1, None, 0.1)
