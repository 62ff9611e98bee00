"""States of engines, pool and availability: who is in service, and who takes the next request.

A pool behind a DNS name: addresses join with the current weights first, and leave. Names are looked up by a fake.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tenacity import RetryCallState

from chat.tokenizer import Tokenizer
from orchestrator.config.engines import EnginesConfig
from orchestrator.engines.factory import make_engine
from orchestrator.engines.http_client import (
    BACKOFF,
    EngineClient,
    TemporaryError,
    new_session,
    parse_retry_after,
    retrying,
    wait_s,
)
from orchestrator.engines.http_engine import HttpEngine, expand
from orchestrator.engines.pool import (
    MAX_FAILURES,
    REST,
    EnginePool,
    Gone,
    InService,
    OutOfService,
    Replica,
    after_failure,
    least_loaded,
)
from orchestrator.engines.protocol import Availability, EngineError
from orchestrator.engines.scripted import ScriptedEngine
from tests.orchestrator.engine_server import TOKEN, EngineServer, serving
from tests.orchestrator.toys import make_config
from tests.support.waiting import until_async
from transport.wire.generation import GenerateRequest
from transport.wire.sample import EncodedTensor


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


PATIENCE_S = 60.0


@dataclass
class Names:
    """A resolver whose answer the test changes."""

    addresses: list[str]
    num_asked: int = 0

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.num_asked += 1
        assert host == "engines.internal"
        if not self.addresses:
            raise OSError("no such name")
        return self.addresses


@asynccontextmanager
async def two_servers() -> AsyncIterator[tuple[EngineServer, EngineServer]]:
    """The same port at two addresses of loopback."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving(EngineServer()))
        port = first.url.rsplit(":", 1)[1]
        other = EngineServer(host="127.0.0.2", url=f"http://127.0.0.2:{port}")
        yield first, await stack.enter_async_context(serving(other))


@asynccontextmanager
async def pool(names: Names, port: str) -> AsyncIterator[HttpEngine]:
    """A started engine that follows `names`."""
    config = EnginesConfig(urls=(f"http://engines.internal:{port}",), resolve_dns=True, start_timeout_s=30)
    engine = HttpEngine(config, TOKEN, resolve=names.resolve, dns_interval_s=0.02)
    await engine.start()
    await engine.served()
    keeping = asyncio.create_task(engine.keep_in_service())
    try:
        yield engine
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        await engine.close()


async def ask(engine: HttpEngine, number: int) -> None:
    tokens = EncodedTensor.of(np.array([1, 2, 3], np.int32))
    await engine.generate(GenerateRequest(request_id=f"r{number}", token_ids=tokens, max_tokens=4, seed=number))


async def test_all_addresses_of_a_name_are_engines() -> None:
    names = Names(["127.0.0.1", "127.0.0.2"])
    async with two_servers() as (first, second), pool(names, first.url.rsplit(":", 1)[1]) as engine:
        await asyncio.gather(*(ask(engine, number) for number in range(8)))
    assert first.num_generate == second.num_generate == 4


async def test_new_address_gets_the_current_weights_before_requests() -> None:
    names = Names(["127.0.0.1"])
    async with two_servers() as (first, second), pool(names, first.url.rsplit(":", 1)[1]) as engine:
        await engine.apply_weights("weights/v3", 3, "digest-3")
        assert second.asked_versions == []
        names.addresses = ["127.0.0.1", "127.0.0.2"]
        await until_async(lambda: len(engine._pool.in_service()) == 2, PATIENCE_S)
        await asyncio.gather(*(ask(engine, number) for number in range(8)))
        assert (await engine.served()).version == 3
    assert second.asked_versions == [3]
    assert set(second.sampled_versions) == {3}


async def test_address_that_is_gone_leaves_and_the_rest_goes_on() -> None:
    names = Names(["127.0.0.1", "127.0.0.2"])
    async with two_servers() as (first, second), pool(names, first.url.rsplit(":", 1)[1]) as engine:
        names.addresses = ["127.0.0.2"]
        await until_async(lambda: [replica.url for replica in engine._pool.replicas] == [second.url], PATIENCE_S)
        before = first.num_generate
        await asyncio.gather(*(ask(engine, number) for number in range(4)))
        assert first.num_generate == before
        assert second.num_generate == 4


async def test_resolver_that_fails_empties_no_pool() -> None:
    names = Names(["127.0.0.1"])
    async with two_servers() as (first, _), pool(names, first.url.rsplit(":", 1)[1]) as engine:
        names.addresses = []
        asked = names.num_asked
        await until_async(lambda: names.num_asked > asked + 2, PATIENCE_S)
        await ask(engine, 0)
        assert engine.availability.is_open


async def test_name_without_an_address_at_start_is_waited_for() -> None:
    names = Names([])
    async with two_servers() as (first, _):

        async def appear() -> None:
            await until_async(lambda: names.num_asked > 1, PATIENCE_S)
            names.addresses = ["127.0.0.1"]

        appearing = asyncio.create_task(appear())
        async with pool(names, first.url.rsplit(":", 1)[1]) as engine:
            await ask(engine, 0)
        await appearing


async def test_addresses_of_both_families_become_urls() -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["10.0.0.2", "::1", "10.0.0.1"]

    assert await expand(["http://pool:8000/", "http://10.0.0.1:8000"], resolve) == [
        "http://10.0.0.1:8000",
        "http://10.0.0.2:8000",
        "http://[::1]:8000",
    ]


async def test_unknown_name_is_named() -> None:
    with pytest.raises(EngineError, match=r"engines\.internal cannot be resolved: no such name"):
        await expand(["http://engines.internal:1"], Names([]).resolve)


def test_certificates_and_addresses_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="does not go with https"):
        EnginesConfig(urls=("https://pool:1",), resolve_dns=True)


@pytest.mark.parametrize(
    ("engines", "kind"),
    [
        ({}, HttpEngine),
        ({"backend": "http"}, HttpEngine),
        ({"backend": "sglang"}, HttpEngine),
        ({"backend": "scripted"}, ScriptedEngine),
    ],
)
def test_the_backend_decides_the_engine(
    tmp_path: Path, tokenizer: Tokenizer, engines: dict[str, Any], kind: type
) -> None:
    assert type(make_engine(make_config(tmp_path, engines=engines), tokenizer)) is kind


def test_http_engines_get_their_token_and_scripted_ones_need_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    token_file = tmp_path / "admin.token"
    make_engine(make_config(tmp_path, engines={"backend": "scripted"}, admin_token_file=token_file), tokenizer)
    assert not token_file.exists()
    make_engine(make_config(tmp_path, admin_token_file=token_file), tokenizer)
    assert token_file.exists()


def test_an_unknown_backend_is_refused_and_the_known_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="'http', 'openai', 'sglang' or 'scripted'"):
        make_config(tmp_path, engines={"backend": "vllm"})
