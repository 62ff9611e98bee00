"""The page's server: only reads, only answers whom it should, and tells browsers to run nothing but its own scripts."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer

from viewer.index.run import Run
from viewer.views.assets import assets
from viewer.views.server import COOKIE, make_app, serve


@pytest_asyncio.fixture
async def client(generated: Run) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(make_app([generated]))) as client:
        yield client


@pytest_asyncio.fixture
async def locked(generated: Run) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(make_app([generated], token="open-sesame"))) as client:
        yield client


async def test_page_its_files_and_its_answers_are_served(client: TestClient) -> None:
    page = await client.get("/")
    assert page.content_type == "text/html"
    for name in assets():
        response = await client.get(f"/static/{name}")
        assert (response.status, await response.text()) == (200, assets()[name])
    assert await (await client.get("/api/runs")).json() == [{"name": "generated"}]
    assert (await (await client.get("/api/0/overview")).json())["last_step"] == 6


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/api/0/overview", "/api/0/rollout?id=x", "/nothing"])
async def test_every_response_forbids_foreign_scripts_and_frames(client: TestClient, path: str) -> None:
    headers = (await client.get(path)).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/static/..%2f..%2fpyproject.toml", 404),
        ("/static/../run.py", 404),
        ("/static/py.typed", 404),
        ("/api/1/overview", 404),
        ("/api/-1/overview", 404),
        ("/api/0000000009/overview", 404),
        ("/api/0/nothing", 404),
        ("/api/0/rollout?id=99.99", 404),
        ("/api/0/rollout?id=x", 400),
        ("/api/0/groups?sort=x", 400),
    ],
)
async def test_what_is_not_there_is_refused(client: TestClient, path: str, status: int) -> None:
    assert (await client.get(path)).status == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_nothing_can_be_changed(client: TestClient, method: str) -> None:
    assert (await client.request(method, "/api/0/overview")).status == 405


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "10.0.0.1"])
async def test_a_request_to_a_foreign_name_is_refused(client: TestClient, host: str) -> None:
    assert (await client.get("/api/0/overview", headers={"Host": host})).status == 403


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1:8765", "[::1]:8765"])
async def test_names_of_this_machine_are_answered(client: TestClient, host: str) -> None:
    assert (await client.get("/api/0/overview", headers={"Host": host})).status == 200


async def test_without_the_token_nothing_is_served(locked: TestClient) -> None:
    for path in ("/", "/static/main.js", "/api/0/overview", "/?token=wrong"):
        assert (await locked.get(path)).status == 401
    wrong = {"Authorization": "Bearer wrong", "Cookie": f"{COOKIE}=wrong"}
    assert (await locked.get("/api/0/overview", headers=wrong)).status == 401


async def test_token_in_the_address_becomes_a_cookie_and_leaves_the_address(locked: TestClient) -> None:
    first = await locked.get("/?token=open-sesame", allow_redirects=False)
    assert (first.status, first.headers["Location"]) == (302, "/")
    cookie = first.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert (await locked.get("/api/0/overview", headers={"Cookie": cookie.split(";")[0]})).status == 200
    assert (await locked.get("/api/0/overview", headers={"Authorization": "Bearer open-sesame"})).status == 200


async def test_server_ends_when_it_is_told(generated: Run) -> None:
    stop, ports = asyncio.Event(), []

    def ready(port: int) -> None:
        ports.append(port)
        stop.set()

    async with asyncio.timeout(60):
        await serve(make_app([generated]), "127.0.0.1", 0, ready, stop)
    assert ports[0] > 0
