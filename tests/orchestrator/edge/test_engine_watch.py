"""An engine that freezes or dies is seen within five seconds, although its requests may take minutes."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from orchestrator.config.engines import EnginesConfig
from orchestrator.engines.http_engine import HttpEngine
from orchestrator.report.status import EngineWatch
from runtime.health.health import Health
from tests.faults.chaos_proxy import ChaosProxy, Faults
from tests.orchestrator.edge.engine_server import TOKEN, EngineServer
from tests.support.waiting import until_async

NOTICE_S = 5.0


@pytest.fixture
async def server() -> AsyncIterator[EngineServer]:
    server = EngineServer()
    await server.open()
    yield server
    await server.close()


@pytest.fixture
def proxy(server: EngineServer) -> Iterator[ChaosProxy]:
    with ChaosProxy(int(server.url.rsplit(":", 1)[1])) as proxy:
        yield proxy


@pytest.fixture
async def health(proxy: ChaosProxy) -> AsyncIterator[Health]:
    """Of a process that watches an engine behind the proxy."""
    health = Health("orchestrator", stall_timeout_s=60)
    engine = HttpEngine(EnginesConfig(urls=(f"http://127.0.0.1:{proxy.port}",)), TOKEN)
    await engine.start()
    watching = asyncio.create_task(EngineWatch(engine, health).run())
    await until_async(lambda: health.report().get("engines") == "connected", 5.0)
    yield health
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await engine.close()


def is_missed(health: Health) -> bool:
    return "did not answer" in str(health.report()["engines"])


async def test_frozen_engine_is_seen_and_seen_again(health: Health, proxy: ChaosProxy) -> None:
    proxy.faults = Faults(black_hole=True)
    await until_async(lambda: is_missed(health), NOTICE_S)
    assert f"engines: an answer of the engines (http://127.0.0.1:{proxy.port}/health did not answer" in health.waits
    proxy.faults = Faults()
    await until_async(lambda: health.report()["engines"] == "connected", 10.0)
    assert health.waits == ""


async def test_dead_engine_is_seen(health: Health, proxy: ChaosProxy, server: EngineServer) -> None:
    await server.close()
    proxy.cut()
    await until_async(lambda: is_missed(health), NOTICE_S)
    await server.open()
    await until_async(lambda: health.report()["engines"] == "connected", 10.0)


async def test_engine_out_of_service_is_shown_with_the_reason() -> None:
    health = Health("orchestrator", stall_timeout_s=60)
    engine = HttpEngine(EnginesConfig(), TOKEN)
    engine.availability.lost("http://engine is out of memory")
    watching = asyncio.create_task(EngineWatch(engine, health).run())
    await asyncio.sleep(0)
    await until_async(lambda: health.waits == "engines: an answer of the engines (http://engine is out of memory)", 5.0)
    watching.cancel()
