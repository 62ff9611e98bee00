"""How busy real HTTP engines say they are."""

import pytest
from aiohttp import web

from orchestrator.config.engines import EnginesConfig
from orchestrator.engines.http_engine import HttpEngine
from orchestrator.engines.protocol import EngineError, EngineLoad
from tests.orchestrator.edge.engine_server import EngineServer, dead, serving


class BusyServer(EngineServer):
    """Says what the contract wants to be said."""

    async def health(self, request: web.Request) -> web.Response:
        load = {"running": 3, "waiting": 2, "max_batch_size": 4}
        return web.json_response({"status": "ok", "vocab_size": self.vocab_size, **load})


async def started(*servers: EngineServer) -> HttpEngine:
    engine = HttpEngine(EnginesConfig(urls=tuple(server.url for server in servers), start_timeout_s=5.0))
    await engine.start()
    return engine


async def test_loads_of_the_engines_in_service_add_up() -> None:
    async with serving(BusyServer()) as first, serving(BusyServer()) as second:
        engine = await started(first, second)
        assert await engine.load() == EngineLoad(num_running=6, num_waiting=4, capacity=8)
        await engine.close()


async def test_an_engine_that_does_not_tell_its_load_has_none() -> None:
    async with serving(EngineServer()) as server:
        engine = await started(server)
        assert await engine.load() == EngineLoad()
        await engine.close()


async def test_an_engine_that_is_gone_is_an_error() -> None:
    async with serving(BusyServer()) as server:
        engine = await started(server)
        async with dead(server):
            with pytest.raises(EngineError, match=r"/health did not answer"):
                await engine.load()
        await engine.close()
