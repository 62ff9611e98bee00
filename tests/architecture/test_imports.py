"""Imports point one way: what really lands in `sys.modules`. Import-linter's contracts are checked by `make check`."""

import re
import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT

HEAVY = {"torch", "transformers", "safetensors", "vllm"}
SERVICES = {"orchestrator", "trainer", "inference"}
ALL_OF_TRANSPORT = """
import importlib, pkgutil, transport
for module in pkgutil.walk_packages(transport.__path__, "transport."):
    if not module.name.endswith("__main__"): importlib.import_module(module.name)
"""
HELP = """
import contextlib, io
from {module} import run
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    run(["--help"])
"""
PROGRAMS = {
    "orchestrator.cli --help": (HELP, HEAVY | SERVICES - {"orchestrator"} | {"verifiers", "zmq"}),
    "orchestrator.service": ("import {module}", HEAVY | SERVICES - {"orchestrator"} | {"verifiers"}),
    "orchestrator.envs.loading": ("import {module}", HEAVY | SERVICES - {"orchestrator"} | {"verifiers"}),
    "trainer.cli --help": (HELP, HEAVY | SERVICES - {"trainer"}),
    "inference.cli --help": (HELP, HEAVY | SERVICES - {"inference"}),
    "inference.service": ("import {module}", HEAVY | SERVICES - {"inference"}),
    "runtime.cli --help": (HELP, HEAVY),
    "viewer.cli": ("import {module}", HEAVY | SERVICES),
    "viewer.views.server": ("import {module}", HEAVY | SERVICES),
    "transport": (ALL_OF_TRANSPORT, HEAVY | SERVICES | {"runtime", "viewer", "verifiers"}),
}
"""What a fresh process does, and what it must not have loaded then."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_import_loads_nothing_heavy_and_no_other_service(name: str) -> None:
    program, forbidden = PROGRAMS[name]
    code = program.format(module=name.split()[0]) + "\nimport sys\nprint(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(done.stdout.split()) & forbidden == set()


@pytest.mark.parametrize(("folder", "other"), [("tests", "benchmarks"), ("benchmarks", "tests")])
def test_tests_and_benchmarks_import_nothing_of_each_other(folder: str, other: str) -> None:
    mention = re.compile(rf"^\s*(from|import) {other}\b", re.MULTILINE)
    assert [str(path) for path in (ROOT / folder).rglob("*.py") if mention.search(path.read_text())] == []
