"""Small files, small functions, no drawer for everything."""

import ast

from tests.architecture.sources import ROOT, nodes, source_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
DRAWERS = {"utils.py", "helpers.py", "common.py", "misc.py", "util.py"}


def test_no_file_is_too_long() -> None:
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in source_files()}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    lengths = {
        f"{path}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(lengths) > 100
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_no_file_is_a_drawer() -> None:
    assert [str(path) for path in source_files() if path.name in DRAWERS] == []


def test_every_module_says_what_it_is_for() -> None:
    without = []
    for path in source_files():
        tree = ast.parse((ROOT / path).read_text())
        if tree.body and not ast.get_docstring(tree):
            without.append(str(path))
    assert without == []


def test_no_todo_is_left() -> None:
    left = [
        str(path)
        for path in source_files()
        if any(word in (ROOT / path).read_text() for word in ("TODO", "FIXME", "XXX"))
    ]
    assert left == []
