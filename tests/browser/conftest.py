"""Debian's chromium, driven by playwright, and pages of generated runs. `make test-browser` installs both."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.viewer.generated_run import Shape, make_run
from viewer.index.run import Run
from viewer.views.server import make_app, serve

DEADLINE_MS = 60_000
HOSTILE = (
    "<img src=x onerror=\"window.hacked=1\"></script><script>window.hacked=1</script><svg onload='window.hacked=1'>"
)


@dataclass
class Watched:
    """A page, and everything that should not have happened on it."""

    page: Page
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, url: str, name: str) -> Page:
        """Go there and wait until the page of that name is drawn."""
        self.page.goto(url)
        self.page.wait_for_selector(f"main[data-page={name}]:not(.loading)")
        return self.page


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    """A new page; the test fails if a script of it failed, or if a text of a run ran as one."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    context.set_default_timeout(DEADLINE_MS)
    page = context.new_page()
    found = Watched(page)
    page.on("pageerror", lambda error: found.problems.append(str(error)))
    page.on("console", lambda message: found.problems.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: found.problems.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: found.requests.append(request.url))
    yield found
    assert page.evaluate("window.hacked") is None
    context.close()
    assert found.problems == []


Serve = Callable[..., str]


@pytest.fixture(scope="session")
def serve_runs() -> Iterator[Serve]:
    """`serve_runs(path, ...)`: the address of a live page of these runs."""
    endings: list[Callable[[], None]] = []

    def start(*paths: Path) -> str:
        runs = [Run(path, None) for path in paths]
        url, end = _serve_in_thread(runs)
        endings.append(end)
        return url

    yield start
    for end in endings:
        end()


def _serve_in_thread(runs: list[Run]) -> tuple[str, Callable[[], None]]:
    loop, stop, ports, ready = asyncio.new_event_loop(), asyncio.Event(), list[int](), threading.Event()

    def note(port: int) -> None:
        ports.append(port)
        ready.set()

    def work() -> None:
        loop.run_until_complete(serve(make_app(runs), "127.0.0.1", 0, note, stop))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(60)

    def end() -> None:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        for run in runs:
            run.close()

    return f"http://127.0.0.1:{ports[0]}/", end


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`good` learns, `flat` does not, `hostile` is full of markup."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "good", Shape())
    make_run(folder / "flat", Shape(learns=False))
    name = HOSTILE.replace("/", "|")
    make_run(folder / name, Shape(answer=HOSTILE, envs=(HOSTILE, "plain")))
    return folder


@pytest.fixture(scope="session")
def good_url(serve_runs: Serve, runs_folder: Path) -> str:
    return serve_runs(runs_folder / "good")


@pytest.fixture(scope="session")
def hostile_run(runs_folder: Path) -> Path:
    return next(path for path in runs_folder.iterdir() if "<img" in path.name)
