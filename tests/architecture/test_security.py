"""Nothing in the services can run code that came over a wire or from a file: ruff's rules, and a walk over the rest.

Finds code that could run what came over a wire or from a file, where ruff does not see it.

Ruff bans modules and functions by name, however they are imported (`TID251` and `S` in pyproject.toml). What is left:
builtins that are only mentioned (`map(eval, texts)`), methods of any object, arguments that must be False, and names
that are looked up as text (`getattr`, `import_module`, `sys.modules[...]`).
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGES, ROOT, source_files

BUILTINS = {"eval", "exec", "compile", "__import__"}

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "jsonpickle", "marshal", "shelve", "joblib", "imp"}

METHODS = {
    *("recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object", "gather_object"),
    *("scatter_object_list", "send_object_list", "recv_object_list"),
}
"""Pickling of pyzmq and torch.distributed."""

KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}
"""Arguments that must be a literal False, if they are given at all."""

IMPORTERS = {"import_module", "run_module", "run_path"}

SECRETS = {"token", "secret", "password", "authorization", "bearer"}


def violations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of everything in `tree` that must not be there."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in BUILTINS:
                yield node.lineno, name
            case ast.Attribute(attr=name) if name in METHODS:
                yield node.lineno, name
            case ast.keyword(arg=str(name), value=value) if name in KEYWORDS:
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield node.lineno, f"{name} = ..."
            case ast.Call(func=function, args=arguments) if _last_word(function) in {"getattr", *IMPORTERS}:
                yield from ((node.lineno, f"{word!r} by name") for word in _forbidden(arguments))
            case ast.Subscript(value=value, slice=key) if _last_word(value) in (
                *("__builtins__", "__dict__", "modules", "globals"),
            ):
                yield from ((node.lineno, f"{word!r} by name") for word in _forbidden([key]))


def dynamic_imports(tree: ast.AST) -> list[int]:
    """Lines that import a module whose name is not written out."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and _last_word(node.func) in IMPORTERS
        and not (node.args and isinstance(node.args[0], ast.Constant))
    ]


def secret_comparisons(tree: ast.AST) -> list[int]:
    """Lines that compare a secret with `==`, `!=` or `in`, which takes the longer the more of it is right."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and any(isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in node.ops)
        and SECRETS & {_last_word(side) for side in (node.left, *node.comparators)}
    ]


def _forbidden(arguments: list[ast.expr]) -> list[str]:
    words = [str(argument.value) for argument in arguments if isinstance(argument, ast.Constant)]
    return [word for word in words if word.split(".")[0] in MODULES | BUILTINS or word in ("load", "loads")]


def _last_word(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.lower()
        case ast.Call(func=function):
            return _last_word(function)
        case ast.Subscript(slice=ast.Constant(value=str(word))):
            return word.lower()
    return ""


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
