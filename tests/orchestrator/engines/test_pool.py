"""States of engines, pool and availability: who is in service, and who takes the next request."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tenacity import RetryCallState

from orchestrator.engines.http_client import (
    BACKOFF,
    EngineClient,
    TemporaryError,
    new_session,
    parse_retry_after,
    retrying,
    wait_s,
)
from orchestrator.engines.pool import EnginePool
from orchestrator.engines.protocol import Availability, EngineError
from orchestrator.engines.replica import (
    MAX_FAILURES,
    REST,
    Gone,
    InService,
    OutOfService,
    Replica,
    after_failure,
    least_loaded,
)
from tests.support.waiting import until_async


async def make_replicas(*names: str) -> list[Replica]:
    session = new_session()
    await session.close()  # these tests send nothing
    return [Replica(EngineClient(session, name, None)) for name in names]


async def test_request_goes_to_the_replica_with_the_least_in_flight() -> None:
    replicas = await make_replicas("a", "b", "c")
    for replica, load in zip(replicas, (3, 1, 2), strict=True):
        replica.num_in_flight = load
    assert least_loaded(replicas, now=0).url == "b"


async def test_replica_that_failed_rests_while_others_are_ready() -> None:
    failed, busy = await make_replicas("failed", "busy")
    busy.num_in_flight = 9
    failed.state = after_failure(InService(), "no answer", now=100)
    assert least_loaded([failed, busy], now=100).url == "busy"
    assert least_loaded([failed, busy], now=100 + REST.first_s).url == "failed"
    assert least_loaded([failed], now=100) is failed


async def test_request_is_counted_while_in_flight_also_when_it_fails() -> None:
    (replica,) = await make_replicas("a")
    counts = []

    def fail() -> None:
        with replica.busy():
            counts.append(replica.num_in_flight)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert counts == [1]
    assert replica.num_in_flight == 0


async def in_pool(*names: str) -> tuple[EnginePool, list[Replica]]:
    replicas = await make_replicas(*names)
    return EnginePool(replicas, Availability()), replicas


def test_each_failure_makes_an_engine_rest_longer_and_the_third_takes_it_out_of_service() -> None:
    first = after_failure(InService(), "no answer 0", now=100)
    assert first == InService(1, rests_until=100 + REST.first_s)
    assert isinstance(first, InService)
    second = after_failure(first, "no answer 1", now=101)
    assert second == InService(2, rests_until=101 + 2 * REST.first_s)
    assert isinstance(second, InService)
    assert after_failure(second, "no answer 2", now=102) == OutOfService("no answer 2")


async def test_engine_leaves_once_at_the_third_failure_in_a_row(log_lines: list[str]) -> None:
    pool, (replica, _) = await in_pool("a", "b")
    states = []
    for number in range(5):
        pool.failed(replica, f"no answer {number}")
        states.append(replica.is_in_service)
    assert states == [True, True, False, False, False]
    assert (MAX_FAILURES, replica.state) == (3, OutOfService("no answer 2"))
    assert sum("engine a is out of service, 1 of 2 are left: no answer 2" in line for line in log_lines) == 1


async def test_a_success_in_between_keeps_an_engine_in_service() -> None:
    pool, (replica,) = await in_pool("a")
    for _ in range(5):
        pool.failed(replica, "no answer")
        pool.failed(replica, "no answer")
        pool.answered(replica)
    assert replica.state == InService(num_failures=0, rests_until=0)


async def test_a_late_answer_does_not_bring_an_engine_back() -> None:
    pool, (replica,) = await in_pool("a")
    pool.leave(replica, "restarted")
    pool.answered(replica)
    pool.leave(replica, "again")
    assert replica.state == OutOfService("restarted")


async def test_nothing_that_comes_late_changes_an_engine_that_is_gone(log_lines: list[str]) -> None:
    pool, (replica, _) = await in_pool("a", "b")
    pool.drop(replica)
    for _ in range(MAX_FAILURES):
        pool.failed(replica, "no answer")
    pool.leave(replica, "behind")
    pool.answered(replica)
    assert replica.state == Gone()
    assert [line for line in log_lines if "out of service" in line] == []


async def test_availability_counts_outages_and_lets_waiters_go() -> None:
    availability = Availability()
    await availability.wait()
    availability.lost("killed")
    availability.lost("still loading")
    waiter = asyncio.create_task(availability.wait())
    await asyncio.sleep(0)
    assert (availability.is_open, availability.reason, availability.num_outages) == (False, "still loading", 1)
    assert not waiter.done()
    availability.restored()
    await waiter
    assert (availability.is_open, availability.reason, availability.num_outages) == (True, "", 1)


async def test_outage_begins_with_the_last_engine_and_ends_with_the_first() -> None:
    availability = Availability()
    replicas = await make_replicas("a", "b")
    pool = EnginePool(replicas, availability)
    ready: set[str] = set()

    async def make_ready(replica: Replica) -> None:
        if replica.url not in ready:
            raise EngineError(f"{replica.url} is loading")

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(pool.keep_in_service(make_ready))
        pool.leave(replicas[0], "killed")
        assert [replica.url for replica in pool.in_service()] == ["b"]
        assert (await pool.pick()).url == "b"
        assert availability.is_open
        pool.leave(replicas[1], "killed")
        picking = tasks.create_task(pool.pick())
        await until_async(lambda: availability.reason in ("a is loading", "b is loading"))
        assert not picking.done()
        ready.add("b")
        assert (await picking).url == "b"
        assert availability.num_outages == 1
        ready.add("a")
        await until_async(lambda: len(pool.in_service()) == 2)
        keeping.cancel()


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, None), ("2", 2.0), ("0.5", 0.5), ("-1", None), ("inf", None), ("Wed, 21 Oct 2015 07:28:00 GMT", None)],
)
def test_retry_after_header(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header) == seconds


def backoff_s(attempt: int, retry_after: float | None = None) -> float:
    """The pause after try `attempt`, to which the engine answered with this `Retry-After`."""
    state = RetryCallState(retrying(0), None, (), {})
    state.attempt_number = attempt
    state.set_exception((TemporaryError, TemporaryError("busy", retry_after), None))
    return wait_s(state)


@given(attempt=st.integers(1, 40), retry_after=st.none() | st.floats(0, 1e6))
def test_backoff_is_bounded_and_honours_retry_after(attempt: int, retry_after: float | None) -> None:
    seconds = backoff_s(attempt, retry_after)
    assert 0 <= seconds <= BACKOFF.longest_s
    if retry_after is not None:
        assert seconds >= min(retry_after, BACKOFF.longest_s)


def test_backoff_grows_and_is_jittered() -> None:
    first, fifth = ([backoff_s(attempt) for _ in range(100)] for attempt in (1, 5))
    assert max(first) <= BACKOFF.first_s < max(fifth)
    assert len({*first}) > 1


async def test_engine_that_is_dropped_while_it_is_made_ready_brings_nothing_back() -> None:
    (replica,) = await make_replicas("a")
    availability = Availability()
    pool = EnginePool([replica], availability)
    pool.leave(replica, "it does not answer")
    was_ready = asyncio.Event()

    async def make_ready(one: Replica) -> None:
        pool.drop(one)
        was_ready.set()

    keeping = asyncio.create_task(pool.keep_in_service(make_ready))
    await asyncio.wait_for(was_ready.wait(), 30)
    keeping.cancel()
    await asyncio.wait([keeping])
    assert pool.in_service() == []
    assert not availability.is_open  # else a request would look for an engine for ever, and never yield


async def test_thousands_of_requests_may_fail_with_their_engine() -> None:
    (replica,) = await make_replicas("a")
    pool = EnginePool([replica], Availability())
    for _ in range(5000):
        pool.failed(replica, "connection reset")
    assert replica.state == OutOfService("connection reset")
    assert backoff_s(5000) <= BACKOFF.longest_s
