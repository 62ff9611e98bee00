"""The file of `rl report`, opened from disk without any network."""

from contextlib import closing
from pathlib import Path

from playwright.sync_api import expect

from tests.browser.conftest import Watched
from viewer.index.run import Run
from viewer.views.report import make_report


def write_report(out: Path, *paths: Path) -> str:
    runs = [Run(path, None) for path in paths]
    out.write_text(make_report(runs, 3_000_000), encoding="utf-8")
    for run in runs:
        with closing(run):
            pass
    return out.as_uri()


def test_report_works_without_a_network(watched: Watched, runs_folder: Path, tmp_path: Path) -> None:
    url = write_report(tmp_path / "report.html", runs_folder / "good")
    watched.page.context.set_offline(True)
    page = watched.open(url, "start")
    expect(page.locator("h1")).to_contain_text("The reward rose")
    expect(page.locator(".pushed .token").first).to_be_visible()
    for name, sign in (
        ("curves", "path.series"),
        ("circle", "g.service"),
        ("batches", "tbody tr"),
        ("groups", "tbody tr"),
    ):
        watched.open(f"{url}#/{name}", name)
        expect(page.locator(sign).first).to_be_visible()
    watched.open(f"{url}#/tokens?masked=1&sort=ratio&env=words", "tokens")
    expect(page.locator(".sequence a").first).to_contain_text("words/")
    page.locator(".sequence a").first.click()
    page.wait_for_selector("main[data-page=sequence]:not(.loading) .token")
    page.locator(".token.trained").nth(1).hover()
    expect(page.locator("#tip")).to_contain_text("logprob when sampled")
    assert {request.partition("#")[0] for request in watched.requests if not request.startswith("data:")} == {url}


def test_report_of_two_runs_one_of_them_hostile(
    watched: Watched, runs_folder: Path, hostile_run: Path, tmp_path: Path
) -> None:
    url = write_report(tmp_path / "both.html", runs_folder / "good", hostile_run)
    page = watched.open(url, "start")
    expect(page.locator(".run-title")).to_have_count(2)
    expect(page.locator("header")).to_contain_text("<img src=x")
    for name in ("curves", "groups", "tokens", "circle"):
        watched.open(f"{url}#/{name}", name)
        assert page.locator("img").count() == 0
