"""Every address that a service binds may be one of IPv6, and is announced so that others can use it."""

import json
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from aiohttp import ClientSession, web

from runtime.health.health import Health, ask_health
from runtime.health.server import HealthServer
from runtime.process.http_listener import listening
from tests.support.ipv6 import needs_ipv6
from tests.transport.weights.weight_ranks import make_offer
from trainer.weights.channel import advertised
from transport.security.exposure import netloc
from transport.security.keys import CurveKeys, make_keys
from transport.weights.client import FetchSettings, fetch_weights
from transport.weights.server import WeightServer, WeightStore

pytestmark = needs_ipv6
ADDRESSES = pytest.mark.parametrize("host", ["::1", "::"])


@pytest.mark.parametrize(
    ("host", "spelled"),
    [("127.0.0.1", "127.0.0.1:5"), ("gpu-7", "gpu-7:5"), ("::1", "[::1]:5"), ("[::1]", "[::1]:5"), ("", ":5")],
)
def test_only_addresses_with_colons_get_brackets(host: str, spelled: str) -> None:
    assert netloc(host, 5) == spelled


@ADDRESSES
def test_health_is_read_where_the_service_says(host: str) -> None:
    health = Health("trainer", stall_timeout_s=60)
    health.ready()
    server = HealthServer(health, host=host, port=0)
    try:
        assert server.url == f"http://[::1]:{server.port}/health"
        assert ask_health(server.url)[0]["status"] == "ok"
        with urllib.request.urlopen(server.url, timeout=30) as reply:
            assert json.load(reply)["service"] == "trainer"
    finally:
        server.close()


@ADDRESSES
async def test_engine_is_reached_at_its_announced_address(host: str) -> None:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    async with (
        listening(app, host, 0, name="test", shutdown_timeout_s=5.0) as url,
        ClientSession() as session,
        session.get(url) as reply,
    ):
        assert await reply.text() == "hello"


@pytest.mark.parametrize("guarded", [False, True])
def test_weights_come_over_zeromq(guarded: bool, tmp_path: Path) -> None:
    if guarded:
        make_keys(tmp_path / "keys")
    tensors = {"a": np.arange(5000, dtype=np.float32)}
    store = WeightStore(2)
    server_keys = CurveKeys.for_server(tmp_path / "keys") if guarded else None
    with WeightServer("tcp://[::1]:0", "default", store, keys=server_keys) as server:
        address = advertised(server.endpoint, "::1")
        offer, (held,) = make_offer(tensors, 1, (address,))
        store.put(offer, bytearray(held))
        client_keys = CurveKeys.for_client(tmp_path / "keys") if guarded else None
        settings = FetchSettings(keys=client_keys, timeout_s=60, lost_timeout_s=60)
        fetched = fetch_weights(address, "default", 1, settings, threading.Event())
    assert fetched.data["a"].tobytes() == tensors["a"].tobytes()
