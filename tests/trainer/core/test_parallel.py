"""Ranks that share rows, or hold copies of the parameters, compute the gradient of the float64 reference."""

from pathlib import Path

import pytest

from tests.support.ranks import RankRun, relative_error, run_ranks
from tests.trainer.core.conftest import References
from tests.trainer.core.parallel_worker import DIVISIONS, Division, train_divisions
from tests.trainer.core.scenarios import SCENARIOS
from trainer.model.attention import overlaps

CASES = [(division, name) for division, names in DIVISIONS.items() for name in names]
each_case = pytest.mark.parametrize(("division", "name"), CASES, ids=[f"{d.name}: {name}" for d, name in CASES])


@pytest.fixture(scope="module")
def runs(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, RankRun]:
    """What the ranks wrote down, by world size."""
    sizes = sorted({division.world_size for division in DIVISIONS})
    return {
        size: run_ranks(size, model_path, tmp_path_factory.mktemp(f"parallel{size}"), train_divisions) for size in sizes
    }


@pytest.mark.integration
@each_case
def test_gradient_is_that_of_the_reference(
    division: Division, name: str, runs: dict[int, RankRun], references: References
) -> None:
    loss, expected = references[SCENARIOS[name], 0]
    run = runs[division.world_size]
    assert run.results()[division.name][name]["loss"] == pytest.approx(loss, rel=1e-5)
    assert relative_error(run.gradients(f"{division.name}, {name}"), expected) < 1e-5


@pytest.mark.integration
@pytest.mark.parametrize("division", DIVISIONS, ids=lambda division: division.name)
def test_counts_do_not_depend_on_how_rows_are_shared(division: Division, runs: dict[int, RankRun]) -> None:
    metrics = [runs[division.world_size].results(rank)[division.name]["packed"]["metrics"] for rank in range(2)]
    plain = runs[2].results()[Division(2, dp_replicate=2).name]["packed"]["metrics"]
    for key in ("tokens/global", "loss_tokens/global", "samples/global", "entropy/all/mean", "ratio/all/max"):
        assert metrics[0][key] == pytest.approx(plain[key], rel=1e-5)
        assert metrics[1][key] == metrics[0][key]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ((0, 4), [(0, 0, 3), (3, 3, 4)]),
        ((4, 8), [(3, 4, 8)]),
        ((8, 12), [(3, 8, 9), (9, 9, 12)]),
    ],
)
def test_parts_of_a_row_see_their_segments_from_the_beginning(
    part: tuple[int, int], expected: list[tuple[int, int, int]]
) -> None:
    assert overlaps((3, 6, 3), *part) == expected
