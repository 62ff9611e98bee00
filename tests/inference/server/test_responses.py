"""What the HTTP layer does when handlers misbehave, and how it binds."""

from contextlib import AbstractAsyncContextManager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from prometheus_client import generate_latest

from inference.api.generation import Completion
from inference.server.routes import STATE
from inference.torch_engine.engine import TorchEngine
from runtime.errors import UserError
from runtime.process.http_listener import listening


async def ok(request: web.Request) -> web.Response:
    return web.Response(text="ok")


def app() -> web.Application:
    application = web.Application()
    application.router.add_get("/", ok)
    return application


def listening_on(host: str, port: int) -> AbstractAsyncContextManager[str]:
    return listening(app(), host, port, name="test", shutdown_timeout_s=5.0)


async def test_free_port_is_chosen_and_named_in_the_url() -> None:
    async with listening_on("127.0.0.1", 0) as url:
        assert url.startswith("http://127.0.0.1:")
        assert not url.endswith(":0")
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert await response.text() == "ok"


async def test_taken_port_is_the_users_to_mend() -> None:
    async with listening_on("127.0.0.1", 0) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(UserError, match=f"cannot bind 127.0.0.1:{port}: Address already in use; set --server"):
            async with listening_on("127.0.0.1", port):
                pass


async def test_address_of_another_machine_is_the_users_to_mend() -> None:
    with pytest.raises(UserError, match=r"cannot bind 203\.0\.113\.7"):
        async with listening_on("203.0.113.7", 0):
            pass


async def test_port_can_be_bound_again_after_closing() -> None:
    async with listening_on("127.0.0.1", 0) as first:
        port = int(first.rpartition(":")[2])
    async with listening_on("127.0.0.1", port) as second:
        assert second == first


async def test_bug_in_a_handler_is_a_500_and_the_connection_lives(
    client: TestClient, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(job: object) -> Completion:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(engine, "generate", broken)
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(2):
        response = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
        assert response.status == 500
        assert "secret detail" not in await response.text()
    assert (await client.get("/health")).status == 200


async def test_unknown_paths_share_one_metric_label(client: TestClient) -> None:
    for path in ("/a", "/b", "/c"):
        await client.get(path)
    text = generate_latest(client.app[STATE].metrics.registry).decode()  # type: ignore[index]
    assert 'tandem_inference_requests_total{route="unknown",status="404"} 3.0' in text
    assert 'route="/a"' not in text
