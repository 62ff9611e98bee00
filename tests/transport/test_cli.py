import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden import schema_3
from tests.transport.samples import RUN, make_batch
from transport.cli import main
from transport.outbox.outbox import Outbox

GOLDEN = str(schema_3.FOLDER / schema_3.BATCH_NAME)


def test_json_describes_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", GOLDEN, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["run_id"], summary["step"], summary["samples"]) == ("golden", 12, 2)
    assert summary["tokens"] == 12
    assert summary["digest"] == schema_3.batch().manifest.digest
    assert [row["advantage"] for row in summary["rows"]] == [-0.5, pytest.approx(0.5)]
    assert [row["oldest_version"] for row in summary["rows"]] == [4, None]


def test_table_names_the_batch_and_bounds_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Outbox(tmp_path, RUN).put(make_batch(1))
    assert main(["inspect", str(tmp_path / "step-00000001.batch"), "--rows", "3"]) == 0
    output = capsys.readouterr().out
    assert f"batch 1 of run {RUN}" in output
    assert "... and 5 more" in output


def test_command_line_reports_a_damaged_file_in_one_line(tmp_path: Path) -> None:
    damaged = tmp_path / "step-00000012.batch"
    damaged.write_bytes(Path(GOLDEN).read_bytes()[:-1] + b"\xff")
    command = [sys.executable, "-m", "transport", "inspect", str(damaged)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {damaged} is corrupt: row 1")
    assert len(result.stderr.splitlines()) == 1


def test_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "nothing")]) == 1
    assert "cannot read" in capsys.readouterr().err
