"""A pool behind a DNS name: addresses join with the current weights first, and leave. Names are looked up by a fake."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from orchestrator.config.engines import EnginesConfig
from orchestrator.engines.http_engine import HttpEngine, expand
from orchestrator.engines.protocol import EngineError
from tests.orchestrator.engine_server import TOKEN, EngineServer, serving
from tests.support.waiting import until_async
from transport.wire.generation import GenerateRequest
from transport.wire.tensor import EncodedTensor

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
    config = EnginesConfig(
        urls=(f"http://engines.internal:{port}",), resolve_dns=True, dns_interval_s=0.02, start_timeout_s=30
    )
    engine = HttpEngine(config, TOKEN, resolve=names.resolve)
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
