"""The page of `rl view` as a person uses it.

The file of `rl report`, opened from disk without any network.
"""

import re
from contextlib import closing
from pathlib import Path

from playwright.sync_api import expect

from tests.browser.conftest import Serve, Watched
from tests.viewer.generated_run import ANSWER
from viewer.index.run import Run
from viewer.views.report import make_report


def test_first_page_tells_why_the_reward_rose(watched: Watched, good_url: str) -> None:
    page = watched.open(good_url, "start")
    expect(page.locator("h1")).to_contain_text("The reward rose from 0.")
    good, bad = page.locator(".lesson .rollout.good"), page.locator(".lesson .rollout.bad")
    expect(good.locator(".chip.up")).to_have_text(re.compile(r"advantage \+"))
    expect(bad.locator(".chip.down")).to_have_text(re.compile("advantage −"))
    assert "".join(good.locator(".pushed .token").all_inner_texts()) == ANSWER
    assert float(good.locator(".pushed small").first.inner_text().replace("+", "")) > 0
    assert bad.locator(".pushed small").first.inner_text().startswith("−")
    expect(bad.locator(".pushed", has_text="masked")).to_have_count(1)
    expect(page).to_have_title("good · Tandem")


def test_curves_draw_and_tell_their_numbers(watched: Watched, good_url: str) -> None:
    page = watched.open(f"{good_url}#/curves", "curves")
    shown = {card.get_attribute("data-chart") for card in page.locator("[data-chart]").all()}
    wanted = {"reward", "loss", "entropy", "mismatch_kl", "staleness", "length_bias", "tokens_per_s", "idle"}
    assert wanted <= shown
    reward = page.locator("[data-chart=reward]")
    paths = [path.get_attribute("d") or "" for path in reward.locator("path.series").all()]
    assert [path.count("L") for path in paths] == [5, 5, 5]  # all, maths, words: six steps each
    expect(reward.locator(".legend")).to_contain_text("maths")
    reward.locator("svg").hover()
    expect(page.locator("#tip")).to_be_visible()
    expect(page.locator("#tip")).to_contain_text("words: 0.")


def test_any_metric_can_be_chosen(watched: Watched, good_url: str) -> None:
    page = watched.open(f"{good_url}#/curves", "curves")
    page.get_by_label("metric").select_option("trainer: grad_norm")
    page.wait_for_url("**metric=trainer**")
    expect(page.locator("[data-chart=any] path.series")).to_have_count(1)


def test_hover_shows_all_values_of_a_token(watched: Watched, good_url: str) -> None:
    page = watched.open(f"{good_url}#/rollout?id=2.0", "rollout")
    page.locator(".token.trained").nth(1).hover()
    tip = page.locator("#tip")
    expect(tip).to_be_visible()
    rows = dict(zip(tip.locator("th").all_inner_texts(), tip.locator("td").all_inner_texts(), strict=True))
    assert rows["token"].startswith('"h"')
    assert (rows["ratio"], rows["entropy"]) == ("1.2000", "0.7500")
    assert (rows["logprob when sampled"], rows["logprob when trained"]) == ("-0.5000", "-0.2500")
    assert {"push", "advantage", "mismatch KL", "probability change", "mask", "policy version"} <= rows.keys()
    page.mouse.move(1, 1)
    expect(tip).to_be_hidden()


def test_tokens_are_coloured_by_the_chosen_measure_and_filters_dim_the_rest(watched: Watched, good_url: str) -> None:
    page = watched.open(f"{good_url}#/groups?step=2", "groups")
    page.locator(".list .name a").first.click()
    page.locator(".rollout.bad a").first.click()
    page.wait_for_selector("main[data-page=rollout]:not(.loading) .token")

    def colours() -> list[str]:
        return page.locator(".token.trained").evaluate_all("all => all.map(one => one.style.backgroundColor)")

    pushed = colours()
    page.get_by_label("colour by").select_option("entropy")
    assert len(set(colours())) == 1
    assert colours() != pushed
    page.get_by_label("colour by").select_option("mask")
    assert len(set(colours())) == 2
    page.get_by_label("masked tokens only").check()
    assert page.locator(".token:not(.dim)").all_inner_texts() == ["h"]
    page.get_by_label("masked tokens only").uncheck()
    page.get_by_label("prompt").uncheck()
    expect(page.locator(".token.given")).to_have_count(0)


def test_versions_and_the_packed_row_are_marked(watched: Watched, good_url: str) -> None:
    page = watched.open(f"{good_url}#/rollout?id=2.0", "rollout")
    assert page.locator(".version").all_inner_texts() == ["v1", "v2"]
    expect(page.locator(".packed p").first).to_contain_text("Step 2, rank 0, micro batch 0, positions 0 to")
    expect(page.locator(".segment")).to_have_count(4)
    expect(page.locator(".segment.own")).to_have_count(1)
    page.locator(".segment:not(.own)").first.click()
    page.wait_for_selector("main[data-page=sequence]:not(.loading) .token")


def test_lists_are_filtered_by_env_mask_and_ratio(watched: Watched, good_url: str) -> None:
    page = watched.open(f"{good_url}#/tokens", "tokens")
    page.get_by_label("environment").select_option("maths")
    page.wait_for_url("**env=maths**")
    expect(page.locator(".sequence a").first).to_have_text(re.compile("^maths/"))
    expect(page.locator(".sequence a", has_text="words/")).to_have_count(0)
    page.get_by_label("with masked tokens").check()
    page.wait_for_url("**masked=1**")
    expect(page.locator(".sequence .chip.up")).to_have_count(0)
    page.get_by_label("order").select_option("ratio")
    page.wait_for_url("**sort=ratio**")
    page.wait_for_selector("main[data-page=tokens]:not(.loading)")
    ratios = [float(text.rpartition(" ")[2]) for text in page.locator(".chip", has_text="ratio").all_inner_texts()]
    assert ratios == sorted(ratios, reverse=True)
    assert len(ratios) > 1


def test_every_page_draws(watched: Watched, good_url: str) -> None:
    for name, sign in (
        ("circle", "g.service"),
        ("batches", "tbody tr"),
        ("groups", "tbody tr"),
        ("tokens", ".sequence"),
    ):
        page = watched.open(f"{good_url}#/{name}", name)
        expect(page.locator(sign).first).to_be_visible()
        expect(page.locator("header nav a.chosen")).to_have_count(1)


def test_failed_rollouts_say_why(watched: Watched, good_url: str) -> None:
    page = watched.open(f"{good_url}#/group?id=maths%2Fexample-0%2F1", "group")
    expect(page.locator(".rollout.failure")).to_contain_text("took <60 s>")
    expect(page.locator(".rollout.failure")).to_contain_text("env_timeout")


def test_what_is_missing_is_said_and_breaks_nothing(watched: Watched, good_url: str) -> None:
    page = watched.open(f"{good_url}#/rollout?id=99.99", "rollout")
    expect(page.locator(".problem")).to_contain_text("not recorded")
    page.locator("header nav a", has_text="Curves").click()
    page.wait_for_selector("main[data-page=curves]:not(.loading)")
    watched.problems.clear()  # the browser reports the 404 itself


def test_two_runs_stand_side_by_side(watched: Watched, serve_runs: Serve, runs_folder: Path) -> None:
    url = serve_runs(runs_folder / "good", runs_folder / "flat")
    page = watched.open(url, "start")
    assert [title.strip() for title in page.locator(".run-title").all_inner_texts()] == ["good", "flat"]
    expect(page.locator("h1").nth(0)).to_contain_text("rose")
    expect(page.locator("h1").nth(1)).to_contain_text("stayed")
    watched.open(f"{url}#/curves", "curves")
    expect(page.locator("[data-chart=loss] path.series")).to_have_count(2)
    expect(page.locator("[data-chart=loss] path.series.dashed")).to_have_count(1)
    watched.open(f"{url}#/group?run=0&id=maths%2Fexample-0%2F1", "group")
    expect(page.locator(".run-title")).to_have_count(2)


def test_hostile_text_does_not_run(watched: Watched, serve_runs: Serve, hostile_run: Path) -> None:
    url = serve_runs(hostile_run)
    page = watched.open(url, "start")
    expect(page.locator(".run-name")).to_contain_text("<img src=x")
    for name in ("curves", "circle", "batches", "groups", "tokens"):
        watched.open(f"{url}#/{name}", name)
        assert page.locator("img, main script, main svg[onload], header script").count() == 0
    watched.open(f"{url}#/rollout?id=1.0", "rollout")
    expect(page.locator(".said").last).to_contain_text('<img src=x onerror="window.hacked=1">')
    page.locator(".token.trained").nth(1).hover()
    expect(page.locator("#tip td").first).to_be_visible()
    page.goto(f"{url}#/group?id={'%3Cimg%20src%3Dx%20onerror%3D%22window.hacked%3D1%22%3E'}")
    expect(page.locator(".problem")).to_contain_text("<img src=x")
    watched.problems[:] = [problem for problem in watched.problems if "404" not in problem]


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
