"""The memory of pictures in flight, in miniature."""

from pathlib import Path

import pytest

from benchmarks import pictures_in_flight


@pytest.mark.slow
def test_orchestrator_holds_pictures_once(tmp_path: Path) -> None:
    """Generous: the benchmark's own figures are far better, but the memory of a small run is noisy."""
    figures = pictures_in_flight.memory(64, 1, pictures_in_flight.make_folder(tmp_path / "model"))
    assert figures["held_mb"] == pytest.approx(67.3, rel=0.01)
    assert figures["in_flight_over_held"] < 2
    assert figures["with_batch_over_held"] < 2
