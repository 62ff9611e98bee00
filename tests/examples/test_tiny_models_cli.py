import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models.cli import main
from tiny_models.recipe import Recipe


def test_makes_a_warm_started_folder_and_says_how_it_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "nested" / "model"
    assert main(["--task", "copy-text", "--warm-start", "1e-8", "--seed", "2", "--out", str(out)]) == 0
    assert Recipe("copy-text", 1e-8, 2).made(out)
    printed = capsys.readouterr().out
    assert "warm start: step    0" in printed
    assert f"{out}: made in" in printed


def test_second_call_does_nothing_and_needs_no_torch(random_folder: Path) -> None:
    code = (
        "import sys; from tiny_models.cli import main; "
        f"code = main(['--task', 'copy-text', '--out', {str(random_folder)!r}]); "
        "sys.exit(code or 3 * ('torch' in sys.modules))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (finished.returncode, finished.stdout) == (0, f"{random_folder}: already made\n")


def test_taken_folder_is_one_line_and_a_failure(random_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--task", "reverse-text", "--out", str(random_folder)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--task", "sort-text", "--out", "x"], "invalid choice: 'sort-text'"),
        (["--task", "copy-text", "--out", "x", "--warm-start", "1.5"], "1.5 is not in [0, 1)"),
        (["--task", "copy-text"], "--out"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert complaint in capsys.readouterr().err
