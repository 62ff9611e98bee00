"""The offline file: whole, bounded, and nothing in its data can become markup or script.

The page's server: only reads, only answers whom it should, and tells browsers to run nothing but its own scripts.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer

from tests.viewer.generated_run import Shape, make_run
from viewer.index.run import Run
from viewer.views.assets import assets, bundle
from viewer.views.report import document, escape_script, make_report
from viewer.views.server import COOKIE, make_app, serve

HOSTILE = "</script><script>window.hacked = 1</script><!--<img src=x onerror=alert(1)>&amp;\u2028"

NAME = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) ([A-Za-z_]\w*)", re.MULTILINE)


class Elements(HTMLParser):
    """Start tags, and the text of each script element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts[-1] += data


def embedded(text: str) -> dict:
    return json.loads(re.search(r'id="embedded">(.*?)</script>', text, re.DOTALL)[1])


def test_report_holds_what_its_first_page_needs(generated: Run) -> None:
    answers = embedded(make_report([generated], max_bytes=4_000_000))["answers"][0]
    story = answers["story"]
    group = answers[f"group {story['group']['group_id']}"]
    assert {story["good"], story["bad"]} <= {rollout["id"] for rollout in group["rollouts"]}
    for rollout in group["rollouts"]:
        assert f"rollout {rollout['id']}" in answers
        assert all(f"sequence {sequence}" in answers for sequence in rollout["sequences"])
    assert len(answers["groups"]["groups"]) == 24
    assert all(f"sequence {row['id']}" in answers for row in answers["sequences"]["sequences"])


@pytest.mark.parametrize("max_bytes", [0, 60_000, 200_000])
def test_report_keeps_to_its_size_and_always_has_the_whole(generated: Run, max_bytes: int) -> None:
    whole = 40_000  # curves and batches of this run, the page itself
    text = make_report([generated], max_bytes)
    data = json.dumps(embedded(text)["answers"], separators=(",", ":"))
    assert len(data) < max_bytes + whole
    assert {"overview", "curves", "story", "circle", "batches"} <= embedded(text)["answers"][0].keys()


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    shape = Shape(num_steps=1, answer=HOSTILE, envs=(HOSTILE.replace("/", "|"),))
    with closing(Run(make_run(tmp_path / "run", shape), None)) as run:
        text = make_report([run], 1_000_000)
    plain = document("title", "{}")
    assert Elements(text).tags == Elements(plain).tags
    assert HOSTILE in json.dumps(embedded(text), ensure_ascii=False)


def test_title_is_escaped() -> None:
    assert "<title>&lt;/title&gt;&lt;script&gt; · Tandem</title>" in document("</title><script>", "{}")


def test_escaped_json_is_the_same_json() -> None:
    assert json.loads(escape_script(json.dumps({"a": HOSTILE}, ensure_ascii=False))) == {"a": HOSTILE}


def test_file_forbids_every_connection() -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', document("t", "{}"))[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "connect-src" not in policy
    assert "http" not in policy


def test_script_is_whole_and_no_two_modules_share_a_name() -> None:
    script = bundle()
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    modules = {name: text for name, text in assets().items() if name.endswith(".js")}
    assert all(f"// {name}\n" in script for name in modules)
    names = [name for text in modules.values() for name in NAME.findall(text)]
    assert sorted(names) == sorted(set(names))


def test_no_module_parses_html_or_code() -> None:
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc"
    code = r"\beval\b|new Function|javascript:"
    assert [name for name, text in assets().items() if re.search(f"{markup}|{code}", text)] == []


def test_page_names_no_other_host() -> None:
    hosts = {name: re.findall(r"(?:https?:)?//[\w.-]+\.\w+[\w./]*", text) for name, text in assets().items()}
    assert {host for found in hosts.values() for host in found} <= {"http://www.w3.org/2000/svg"}


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
