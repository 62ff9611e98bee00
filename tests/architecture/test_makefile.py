"""The targets that people and CI call, and what they would run."""

import subprocess

import pytest

from tests.architecture.sources import ROOT


def dry_run(*arguments: str) -> str:
    """What `make` would do in a clean clone."""
    command = ["make", "--dry-run", "--always-make", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("demo", ".venv/bin/rl @ configs/"),
        ("test", '.venv/bin/python -m pytest -m "not slow"'),
        ("test-all", ".venv/bin/python -m pytest"),
        ("check", ".venv/bin/mypy"),
        ("check", ".venv/bin/lint-imports"),
        ("check", ".venv/bin/ruff format --check"),
        ("bench", "-m benchmarks."),
        ("faults", ".venv/bin/python -m benchmarks.faults exactly-once --kills 200"),
        ("test-browser", ".venv/bin/python -m pytest tests/browser"),
    ],
)
def test_target_installs_and_then_runs(target: str, command: str) -> None:
    lines = dry_run(target)
    install = lines.index("pip --disable-pip-version-check install")
    assert install < lines.index(command)


@pytest.mark.parametrize("target", ["test", "test-all"])
def test_files_run_whole_and_in_the_order_of_the_tests(target: str) -> None:
    """xdist's own order, by number of tests, begins the longest files last: they have one test each."""
    assert "--dist loadfile --no-loadscope-reorder" in dry_run(target)


def test_torch_comes_first_and_from_the_index_that_was_asked_for() -> None:
    torch, rest = [line for line in dry_run("install", "TORCH_INDEX=there").splitlines() if "pip" in line][:2]
    assert "--index-url there torch==" in torch
    assert "--constraint requirements/constraints.txt" in rest


def test_versions_of_torch_agree() -> None:
    version = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("TORCH_VERSION"))
    assert f'"torch=={version.split()[-1]}"' in (ROOT / "pyproject.toml").read_text()


def test_demo_config_exists() -> None:
    demo = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("DEMO"))
    assert (ROOT / demo.split()[-1]).is_file()


def test_every_benchmark_that_is_named_exists() -> None:
    names = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("BENCHES"))
    assert all((ROOT / "benchmarks" / f"{name}.py").is_file() for name in names.split()[2:])


def test_ci_runs_every_suite_and_ends_with_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    stages = [line for line in script.read_text().splitlines() if line.startswith(("stage ", "tests "))]
    assert stages[:2] == ["stage install", "stage check"]
    assert stages[-1] == "tests test"
    assert {"tests test-browser", "tests test-vllm"} <= set(stages)
    assert script.stat().st_mode & 0o111
