"""The viewer's benchmark measures the run that it says it makes."""

from pathlib import Path

from benchmarks.viewer import PAGES, make_large_run, measure


def test_benchmark_opens_all_rollouts_and_asks_for_every_page(tmp_path: Path) -> None:
    make_large_run(tmp_path / "run", 1200)
    figures = measure(tmp_path / "run", tmp_path / "cache")
    assert figures["counts"] == {"rollouts": 1200, "groups": 150, "tokens": 192}
    assert figures["page_ms"].keys() == PAGES.keys()
