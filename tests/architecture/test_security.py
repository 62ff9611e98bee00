"""Nothing in the services can run code that came over a wire or from a file: a walk over their syntax trees."""

import ast
import re

import pytest

from tests.architecture.foreign_code import dynamic_imports, parse, secret_comparisons, violations
from tests.architecture.sources import PACKAGES, ROOT, source_files

FOLDERS = (*PACKAGES, "examples", "tandem_harness")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not {"build", "dist"} & set(path.relative_to(ROOT).parts)
)
MAY_IMPORT_BY_NAME = {
    "orchestrator/advantages/factory.py": "a custom advantage function, named in the user's config",
    "orchestrator/curriculum/weights.py": "a custom curriculum, named in the user's config",
    "orchestrator/envs/verifiers_adapter.py": "an environment, named in the user's config",
    "trainer/losses/custom.py": "a custom loss, named in the user's config",
}
"""Files that import a module whose name is data, and why that data is the user's own."""


def test_nothing_runs_what_came_over_a_wire_or_from_a_file() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}: {what}" for path in FILES for line, what in violations(parse(path))]
    assert found == []


def test_modules_are_imported_by_name_only_where_the_user_names_them() -> None:
    found = {str(path.relative_to(ROOT)) for path in FILES if dynamic_imports(parse(path))}
    assert found <= set(MAY_IMPORT_BY_NAME)


def test_secrets_are_compared_in_constant_time() -> None:
    """Only where tokens are secrets: elsewhere they are the numbers that a model reads."""
    doors = ("inference/server", "orchestrator/gateway", "runtime", "transport")
    paths = [path for path in FILES if str(path.relative_to(ROOT)).startswith(doors)]
    assert [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in secret_comparisons(parse(path))] == []
    routes = (ROOT / "inference" / "server" / "admin_routes.py").read_text()
    assert "hmac.compare_digest(" in routes


def test_every_source_file_is_walked() -> None:
    walked = {path.relative_to(ROOT).parts[0] for path in FILES}
    assert walked == set(FOLDERS)
    assert {ROOT / path for path in source_files()} <= set(FILES)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from pickle import loads as harmless",
        "import cloudpickle.fast",
        "from marshal import *",
        "import torch\ntorch.load(x)",
        "import torch as t\nt.load(x)",
        "from torch import load\nload(x)",
        "from torch import load as read",
        "import torch\nreader = torch.load",
        "import torch\nlist(map(torch.load, files))",
        "import numpy as np\nnp.load(x)",
        "import numpy as n\nn.load(x, allow_pickle=True)",
        "read(x, allow_pickle=flag)",
        "import yaml\nyaml.load(x)",
        "import yaml\nyaml.load(x, Loader=yaml.Loader)",
        "from yaml import unsafe_load",
        "eval(x)",
        "run = eval",
        "list(map(eval, xs))",
        "exec(x)",
        "compile(x, 'f', 'exec')",
        "__import__('os')",
        "import builtins\nbuiltins.eval(x)",
        "import builtins\ngetattr(builtins, 'eval')(x)",
        "from builtins import eval as calculate\ncalculate(x)",
        "__builtins__['eval'](x)",
        "globals()['eval'](x)",
        "import sys\nsys.modules['pickle']",
        "import importlib\nimportlib.import_module('pickle')",
        "from importlib import import_module\nimport_module('marshal')",
        "import torch\ngetattr(torch, 'load')(x)",
        "import subprocess\nsubprocess.run(x, shell=True)",
        "import subprocess\nsubprocess.run(x, shell=flag)",
        "import os\nos.system(x)",
        "socket.recv_pyobj()",
        "import torch.distributed as dist\ndist.broadcast_object_list(x)",
        "load(x, trust_remote_code=True)",
        "load(x, trust_remote_code=config.trust)",
        "from torch.distributed.checkpoint import FileSystemReader",
        "import multiprocessing\nmultiprocessing.Queue()",
    ],
)
def test_walk_is_not_fooled(code: str) -> None:
    assert list(violations(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import re\nre.compile('x')",
        "import numpy as np\nnp.loadtxt(x)",
        "model.eval()",
        "self.evaluate(x)",
        "loader.load(x)",
        "load(x, trust_remote_code=False)",
        "import subprocess\nsubprocess.run(['ls'])",
        "getattr(config, 'path')",
        "rows['load']",
        "import json\njson.loads(x)",
        "import msgspec\nmsgspec.json.decode(x)",
    ],
)
def test_walk_leaves_harmless_code_alone(code: str) -> None:
    assert list(violations(ast.parse(code))) == []


@pytest.mark.parametrize(
    "code", ["token == given", "given != self.secret", "headers['Authorization'] == x", "x in token"]
)
def test_comparisons_that_leak_are_seen(code: str) -> None:
    assert secret_comparisons(ast.parse(code)) == [1]


@pytest.mark.parametrize("code", ["token is None", "hmac.compare_digest(token, given)", "num_tokens == 3"])
def test_other_comparisons_are_left_alone(code: str) -> None:
    assert secret_comparisons(ast.parse(code)) == []


def test_names_that_are_data_are_seen() -> None:
    assert dynamic_imports(ast.parse("import importlib\nimportlib.import_module(name)")) == [2]
    assert dynamic_imports(ast.parse("import importlib\nimportlib.import_module('json')")) == []


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
