"""Nothing in the services can run code that came over a wire or from a file: ruff's rules, and a walk over the rest."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.foreign_code import dynamic_imports, secret_comparisons, violations
from tests.architecture.sources import PACKAGES, ROOT, source_files

FILES = sorted(
    path
    for folder in (*PACKAGES, "examples", "tandem_harness")
    for path in (ROOT / folder).rglob("*.py")
    if not {"build", "dist"} & set(path.relative_to(ROOT).parts)
)
MAY_IMPORT_BY_NAME = {
    "orchestrator/envs/verifiers/loading.py": "an environment, named in the user's config",
    "runtime/base/imported.py": "a custom advantage function, curriculum or loss, named in the user's config",
}
"""Files that import a module whose name is data, and why that data is the user's own."""
IMPORTS = """
import asyncio, builtins, multiprocessing, os, subprocess
import numpy as n
import torch, yaml
"""
BANNED_BY_RUFF = """
import pickle
import pickle as p
from pickle import loads as harmless
import cloudpickle.fast
from marshal import *
from torch import load as read
reader = torch.load
list(map(torch.load, files))
n.load(x)
yaml.load(x, Loader=yaml.Loader)
from yaml import unsafe_load
from builtins import eval as calculate
builtins.exec(x)
eval(x)
exec(x)
os.system(x)
subprocess.run(x, shell=True)
subprocess.getoutput(x)
from torch.distributed.checkpoint import FileSystemReader
multiprocessing.Queue()
asyncio.create_subprocess_shell(x)
"""
FOUND_BY_THE_WALK = """
run = eval
list(map(eval, xs))
compile(x, 'f', 'exec')
__import__('os')
getattr(builtins, 'eval')(x)
__builtins__['eval'](x)
globals()['eval'](x)
sys.modules['pickle']
importlib.import_module('pickle')
import_module('marshal')
getattr(torch, 'load')(x)
read(x, allow_pickle=flag)
subprocess.run(x, shell=flag)
socket.recv_pyobj()
dist.broadcast_object_list(x)
load(x, trust_remote_code=config.trust)
"""
HARMLESS = """
re.compile("x")
n.loadtxt(x)
model.eval()
loader.load(x)
subprocess.run(["ls"])
json.loads(x)
load(x, trust_remote_code=False)
getattr(config, "path")
rows["load"]
"""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def lines_of(code: str, start: int = 1) -> set[int]:
    """Numbers of the lines of `code` that are not empty, if its first one has number `start`."""
    return {start + number for number, line in enumerate(code.splitlines()) if line}


def test_ruff_bans_modules_and_functions_however_they_are_imported() -> None:
    """With the settings of `make check`, in a file of a service."""
    code = IMPORTS + BANNED_BY_RUFF + HARMLESS
    ruff = Path(sys.executable).with_name("ruff")
    command = [ruff, "check", "--output-format", "concise", "--stdin-filename", "trainer/x.py", "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, cwd=ROOT, timeout=60)
    found = {int(line) for line in re.findall(r"^trainer/x\.py:(\d+):\d+: (?:TID251|S\d+) ", done.stdout, re.MULTILINE)}
    assert found == lines_of(BANNED_BY_RUFF, start=len(IMPORTS.splitlines()) + 1), done.stdout


def test_walk_finds_the_rest_and_leaves_harmless_code_alone() -> None:
    assert {line for line, _ in violations(ast.parse(FOUND_BY_THE_WALK + HARMLESS))} == lines_of(FOUND_BY_THE_WALK)


def test_nothing_runs_what_came_over_a_wire_or_from_a_file() -> None:
    assert [f"{path.relative_to(ROOT)}:{line}: {what}" for path in FILES for line, what in violations(tree(path))] == []


def test_modules_are_imported_by_name_only_where_the_user_names_them() -> None:
    found = {str(path.relative_to(ROOT)) for path in FILES if dynamic_imports(tree(path))}
    assert found <= set(MAY_IMPORT_BY_NAME)


def test_secrets_are_compared_in_constant_time() -> None:
    """Only where tokens are secrets: elsewhere they are the numbers that a model reads."""
    doors = (
        "inference/api/handlers.py",
        "inference/server",
        "inference/vllm_engine/routes.py",
        "orchestrator/gateway",
        "runtime",
        "transport",
    )
    paths = [path for path in FILES if str(path.relative_to(ROOT)).startswith(doors)]
    assert [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in secret_comparisons(tree(path))] == []
    handlers = (ROOT / "inference" / "api" / "handlers.py").read_text()
    assert "hmac.compare_digest(" in handlers


def test_comparisons_that_leak_are_seen() -> None:
    leaks = "token == given\ngiven != self.secret\nheaders['Authorization'] == x\nx in token\n"
    others = "token is None\nhmac.compare_digest(token, given)\nnum_tokens == 3\n"
    assert secret_comparisons(ast.parse(leaks + others)) == [1, 2, 3, 4]


def test_names_that_are_data_are_seen() -> None:
    assert dynamic_imports(ast.parse("importlib.import_module('json')\nimportlib.import_module(name)")) == [2]


@pytest.mark.parametrize("pattern", [r"pypi\.org", r"pythonhosted", r"download\.pytorch\.org"])
def test_no_registry_host_is_named(pattern: str) -> None:
    files = [ROOT / path for path in source_files()]
    files += [
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
        *(path for path in (ROOT / "requirements").rglob("*") if path.suffix != ".pyc"),  # of an earlier run
        *(ROOT / ".ci").iterdir(),
    ]
    assert [str(path) for path in files if path.is_file() and re.search(pattern, path.read_text())] == []
