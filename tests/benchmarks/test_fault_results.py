import json
import math
import multiprocessing
from pathlib import Path

import pytest

from benchmarks.fault_results import record


def test_a_section_replaces_itself_and_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "results" / "faults.json"
    record("one", {"kills": 1}, path)
    record("two", {"kills": 2}, path)
    record("one", {"kills": 3}, path)
    sections = json.loads(path.read_text())
    assert (sections["one"]["kills"], sections["two"]["kills"]) == (3, 2)
    assert sections["one"]["measured"]["cores"] >= 1


def test_drivers_that_finish_at_once_lose_no_section(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=record, args=(f"section{number}", {}, path)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=30)
        assert writer.exitcode == 0
    assert len(json.loads(path.read_text())) == 8


def test_figures_that_are_no_numbers_leave_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    record("one", {"kills": 1}, path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        record("one", {"mean_s": math.nan}, path)
    assert path.read_bytes() == before
