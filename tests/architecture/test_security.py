"""Nothing in the services can run code that came over a wire or from a file: a walk over their syntax trees."""

import ast
import re

import pytest

from tests.architecture.sources import ROOT, dotted, imported_modules, nodes, source_files

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "os.system",
    "os.popen",
}
FORBIDDEN_CALLS |= {
    "numpy.load",
    "np.load",
    "pickle.loads",
    "pickle.load",
    "tempfile.mktemp",
    "dist.broadcast_object_list",
}


def violations(find: object) -> list[str]:
    assert callable(find)
    return [
        f"{path}:{node.lineno}: {what}" for path, node in nodes() if (what := find(node)) and hasattr(node, "lineno")
    ]


def test_no_module_that_unpickles_is_imported() -> None:
    def find(node: ast.AST) -> str:
        return next((name for name in imported_modules(node) if name.split(".")[0] in FORBIDDEN_MODULES), "")

    assert violations(find) == []


def test_no_call_that_runs_foreign_code() -> None:
    def find(node: ast.AST) -> str:
        name = dotted(node.func) if isinstance(node, ast.Call) else ""
        return name if name in FORBIDDEN_CALLS else ""

    assert violations(find) == []


def test_no_shell() -> None:
    def find(node: ast.AST) -> str:
        is_true = isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant) and node.value.value is True
        return "shell=True" if is_true and isinstance(node, ast.keyword) and node.arg == "shell" else ""

    assert violations(find) == []


def test_remote_code_is_never_trusted_by_default() -> None:
    def find(node: ast.AST) -> str:
        if not (isinstance(node, ast.keyword) and node.arg == "trust_remote_code"):
            return ""
        return "trust_remote_code=True" if isinstance(node.value, ast.Constant) and node.value.value else ""

    assert violations(find) == []


def test_walk_sees_what_it_looks_for() -> None:
    tree = ast.parse("import pickle\ntorch.load(x)\nsubprocess.run(x, shell=True)")
    assert [name for node in ast.walk(tree) for name in imported_modules(node)] == ["pickle"]
    assert "torch.load" in {dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


@pytest.mark.parametrize("pattern", [r"pypi\.org", r"pythonhosted", r"download\.pytorch\.org"])
def test_no_registry_host_is_named(pattern: str) -> None:
    files = [ROOT / path for path in source_files()]
    files += [
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
        *(ROOT / "requirements").rglob("*"),
        *(ROOT / ".ci").iterdir(),
    ]
    assert [str(path) for path in files if path.is_file() and re.search(pattern, path.read_text())] == []
