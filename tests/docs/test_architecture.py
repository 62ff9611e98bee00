"""`docs/architecture.md` is a map: every path, symbol and module that it names exists, and every room is on it."""

import ast
import re
from importlib.util import find_spec

import pytest

from tests.architecture.sources import ROOT, source_files

PAGE = (ROOT / "docs" / "architecture.md").read_text()
SPANS = sorted(set(re.findall(r"`([^`\n]+)`", PAGE)))
PATHS = [span for span in SPANS if re.fullmatch(r"[\w./-]+/[\w.-]*(:[\w.]+)?", span)]
MODULES = re.findall(r"python -m ([\w.]+)", PAGE)


@pytest.mark.parametrize("named", PATHS)
def test_every_path_and_symbol_exists(named: str) -> None:
    path, _, symbol = named.partition(":")
    assert (ROOT / path).exists()
    if symbol:
        assert has_symbol(ast.parse((ROOT / path).read_text()), symbol)


def has_symbol(tree: ast.AST, symbol: str) -> bool:
    """Whether `Class`, `function` or `Class.method` is defined in `tree`."""
    first, _, rest = symbol.partition(".")
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = {node.name}
        elif isinstance(node, ast.Assign):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        else:
            continue
        if first in names:
            return not rest or has_symbol(node, rest)
    return False


def test_symbols_are_looked_for() -> None:
    tree = ast.parse("class A:\n    def b(self): ...\nC = 1\n")
    assert [has_symbol(tree, name) for name in ("A", "A.b", "C", "A.c", "b")] == [True, True, True, False, False]
    assert sum(":" in path for path in PATHS) > 20


@pytest.mark.parametrize("module", MODULES)
def test_every_module_that_is_run_exists(module: str) -> None:
    assert find_spec(module) is not None


def test_every_room_is_on_the_map() -> None:
    rooms = {"/".join(path.parts[:2]) for path in source_files() if len(path.parts) > 2 and path.parts[0] != "viewer"}
    assert len(rooms) > 30
    assert [room for room in sorted(rooms) if f"`{room}/`" not in PAGE] == []
