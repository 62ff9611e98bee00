"""Engines that die, lie, lag behind and come back: real servers that are closed and opened again on their port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from orchestrator.config.engines import EnginesConfig
from orchestrator.engines.http_engine import HttpEngine
from orchestrator.engines.protocol import EngineError
from tests.orchestrator.engine_server import TOKEN, EngineServer, Misbehave, dead, serving
from tests.orchestrator.engines.test_http_engine import ask, hang, status
from tests.support.waiting import until_async
from transport.wire.generation import ServedWeights

AS_STARTED = ServedWeights(version=0, digest="scripted-0")


@asynccontextmanager
async def pool_of(*servers: EngineServer, **options: float) -> AsyncIterator[HttpEngine]:
    """An engine as the orchestrator has it: started, and kept in service."""
    settings = {"start_timeout_s": 5, "request_timeout_s": 5, "update_timeout_s": 5} | options
    engine = HttpEngine(EnginesConfig(urls=tuple(server.url for server in servers), **settings), TOKEN)
    try:
        await engine.start()
        await engine.served()
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(engine.keep_in_service())
            yield engine
            keeping.cancel()
    finally:
        await engine.close()


async def apply(engine: HttpEngine, version: int) -> None:
    await engine.apply_weights(f"/weights/v{version}/manifest.json", version, f"digest-{version}")


async def apply_at_last(engine: HttpEngine, version: int) -> None:
    """As the policy does: again and again."""
    while True:
        try:
            return await apply(engine, version)
        except EngineError:
            await asyncio.sleep(0.01)


async def burst(engine: HttpEngine, count: int, first: int = 0) -> set[int]:
    """Versions that answered `count` requests at once."""
    replies = await asyncio.gather(*(engine.generate(ask(first + seed)) for seed in range(count)))
    return {span.version for reply in replies for span in reply.versions}


async def test_requests_of_a_dead_engine_go_to_another_one(log_lines: list[str]) -> None:
    dying = EngineServer(misbehaviours=[hang] * 8)
    async with serving(EngineServer()) as alive, serving(dying), pool_of(dying, alive) as engine:
        asking = asyncio.create_task(burst(engine, 16))
        await until_async(lambda: dying.num_generate == 8)
        async with dead(dying):
            assert await asking == {0}
            assert alive.num_generate == 16
            await burst(engine, 6)
            assert alive.num_generate == 22, "an engine that is out of service gets no request"
    assert sum("is out of service, 1 of 2 are left" in line and dying.url in line for line in log_lines) == 1


async def test_an_engine_that_comes_back_gets_the_weights_before_the_first_request(log_lines: list[str]) -> None:
    async with (
        serving(EngineServer()) as alive,
        serving(EngineServer()) as mortal,
        pool_of(mortal, alive) as engine,
    ):
        await apply(engine, 1)
        async with dead(mortal, AS_STARTED):
            assert await burst(engine, 8) == {1}
            await apply_at_last(engine, 2)
            await apply_at_last(engine, 3)
            mortal.num_generate = 0
        answered = set()
        while not mortal.num_generate:
            answered |= await burst(engine, 8)
        assert answered == set(mortal.sampled_versions[-mortal.num_generate :]) == {3}
        assert mortal.asked_versions == [1, 3], "the version in between is skipped"
    assert any(f"engine {mortal.url} is back in service with version 3" in line for line in log_lines)


async def test_a_version_goes_live_on_the_healthy_ones_while_a_dead_one_is_out() -> None:
    async with (
        serving(EngineServer()) as alive,
        serving(EngineServer()) as dying,
        pool_of(alive, dying) as engine,
    ):
        async with dead(dying):
            with pytest.raises(EngineError, match=f"{dying.url}.* did not answer"):
                await apply(engine, 1)
            await apply_at_last(engine, 1)
            assert await engine.served() == ServedWeights(version=1, digest="digest-1")
            await apply(engine, 2)  # it holds up nothing any more
        assert alive.engine.weights.version == 2


async def test_an_engine_that_was_restarted_unnoticed_is_found_out_by_its_first_reply(log_lines: list[str]) -> None:
    async with serving(EngineServer()) as one, serving(EngineServer()) as two, pool_of(one, two) as engine:
        await apply(engine, 3)
        two.engine.weights = AS_STARTED
        assert await burst(engine, 8) == {3}, "nothing of the old version comes through"
        await until_async(lambda: two.engine.weights.version == 3)
    assert any(f"engine {two.url} is out of service" in line and "version 0" in line for line in log_lines)


async def test_all_engines_out_is_an_outage_that_requests_wait_out() -> None:
    async with serving(EngineServer()) as server, pool_of(server) as engine:
        await apply(engine, 1)
        async with dead(server, AS_STARTED):
            asking = asyncio.create_task(burst(engine, 4))
            await until_async(lambda: not engine.availability.is_open)
            assert server.url in engine.availability.reason
            assert not asking.done()
            with pytest.raises(EngineError, match=f"no engine is in service: .*{server.url}"):
                await apply(engine, 2)
        assert await asking == {2}, "it gets the newest weights, although nobody has them yet"
        assert engine.availability.num_outages == 1
        await apply(engine, 2)


async def test_a_torn_publish_does_not_keep_an_engine_out() -> None:
    async with serving(EngineServer()) as server, pool_of(server) as engine:
        await apply(engine, 1)
        with pytest.raises(EngineError, match="hash mismatch"):
            await engine.apply_weights("corrupt", 2, "digest-2")
        async with dead(server, AS_STARTED):
            asking = asyncio.create_task(burst(engine, 4))
            await until_async(lambda: not engine.availability.is_open)
        assert await asking == {1}


async def test_before_the_first_update_an_engine_comes_back_with_the_weights_it_was_started_with() -> None:
    async with serving(EngineServer()) as server, pool_of(server) as engine:
        async with dead(server):
            asking = asyncio.create_task(burst(engine, 4))
            await until_async(lambda: not engine.availability.is_open)
        assert await asking == {0}
        async with dead(server, ServedWeights(version=0, digest="of another model")):
            asking = asyncio.create_task(burst(engine, 4))
            await until_async(lambda: not engine.availability.is_open)
        await until_async(lambda: "serves version 0 (of another model)" in engine.availability.reason)
        asking.cancel()


async def test_engines_that_answer_no_update_leave_even_if_nobody_asks_them_for_tokens() -> None:
    async with serving(EngineServer()) as server, pool_of(server) as engine:
        async with dead(server):
            for _ in range(3):
                with pytest.raises(EngineError, match=f"{server.url}.* did not answer"):
                    await apply(engine, 1)
            assert not engine.availability.is_open
        await engine.availability.wait()
        assert server.engine.weights.version == 1
        await apply(engine, 1)


async def test_an_engine_of_another_vocabulary_is_not_taken_back() -> None:
    async with serving(EngineServer()) as server, pool_of(server) as engine:
        async with dead(server):
            asking = asyncio.create_task(burst(engine, 4))
            await until_async(lambda: not engine.availability.is_open)
            server.vocab_size = 99
        await until_async(lambda: "vocabulary of 99, not 64" in engine.availability.reason)
        asking.cancel()


async def test_an_engine_that_serves_the_old_version_holds_up_three_tries_and_no_more(log_lines: list[str]) -> None:
    """The others took the version: it is the engine that is ill, not the publish."""
    liar = EngineServer(lies_about_weights=True)
    async with serving(EngineServer()) as honest, serving(liar), pool_of(honest, liar) as engine:
        for _ in range(2):
            with pytest.raises(EngineError, match=rf"{liar.url} should serve version 4 .* serves version 0"):
                await apply(engine, 4)
        await apply(engine, 4)
        assert await burst(engine, 6) == {4}
    assert any(f"engine {liar.url} is out of service" in line and "serves version 0" in line for line in log_lines)


async def test_a_publish_that_nobody_can_load_takes_nobody_out() -> None:
    async with serving(EngineServer()) as one, serving(EngineServer()) as two, pool_of(one, two) as engine:
        for _ in range(4):
            with pytest.raises(EngineError, match=r"409.*; .*409"):
                await engine.apply_weights("corrupt", 4, "digest-4")
        assert await burst(engine, 8) == {0}
        assert one.num_generate == two.num_generate == 4


@pytest.mark.parametrize(("fault", "num_outages"), [(status(429), 0), (status(503), 1)], ids=["busy", "ill"])
async def test_only_an_engine_that_is_ill_leaves_the_service(fault: Misbehave, num_outages: int) -> None:
    async with (
        serving(EngineServer(misbehaviours=[fault] * 3)) as server,
        pool_of(server, max_retries=2) as engine,
    ):
        with pytest.raises(EngineError, match="told to"):
            await engine.generate(ask())
        assert engine.availability.num_outages == num_outages
        assert await burst(engine, 2) == {0}


async def test_start_goes_on_with_those_that_are_there(log_lines: list[str]) -> None:
    loading = EngineServer(num_loading=1000)
    async with (
        serving(EngineServer()) as alive,
        serving(loading),
        pool_of(alive, loading, start_timeout_s=0.5) as engine,
    ):
        await apply(engine, 1)
        assert await burst(engine, 4) == {1}
        assert loading.num_generate == 0
        loading.num_loading = 0
        await until_async(lambda: loading.engine.weights.version == 1)
    assert any(f"engine {loading.url} is out of service" in line for line in log_lines)
