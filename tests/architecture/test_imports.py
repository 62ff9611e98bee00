"""Imports point one way: import-linter's contracts, and what really lands in `sys.modules`."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, imported_modules, nodes

HEAVY = ("torch", "transformers", "safetensors", "vllm")


def modules_after(statement: str) -> set[str]:
    """Top-level modules that are loaded in a fresh process after `statement`."""
    program = f"import sys\n{statement}\nprint('\\n'.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_import_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "orchestrator.cli",
        "orchestrator.service",
        "runtime.cli",
        "transport",
        "trainer.cli",
        "viewer.cli",
        "viewer.server",
    ],
)
def test_import_loads_nothing_heavy(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize(
    ("module", "foreign"),
    [
        ("orchestrator.cli", {"trainer", "inference"}),
        ("trainer.cli", {"orchestrator", "inference"}),
        ("inference.cli", {"orchestrator", "trainer"}),
        ("transport", {"orchestrator", "trainer", "inference", "runtime"}),
        ("viewer.server", {"orchestrator", "trainer", "inference"}),
    ],
)
def test_services_do_not_load_each_other(module: str, foreign: set[str]) -> None:
    assert modules_after(f"import {module}").isdisjoint(foreign)


@pytest.mark.parametrize("service", ["orchestrator", "trainer", "inference", "rl"])
def test_help_answers_without_loading_torch(service: str) -> None:
    script = Path(sys.executable).with_name(service)
    started = time.monotonic()
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "--run.name" in done.stdout
    assert time.monotonic() - started < 30  # about a second on a quiet machine; torch alone would take several


def test_only_one_module_imports_verifiers() -> None:
    importers = {
        path.as_posix()
        for path, node in nodes()
        if any(name.split(".")[0] == "verifiers" for name in imported_modules(node))
    }
    assert importers == {"orchestrator/envs/verifiers_adapter.py"}
