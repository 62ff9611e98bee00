"""Small files, small functions, few files in a folder, no drawer for everything, one meaning for a class name."""

import ast
from collections import Counter

from tests.architecture.sources import ROOT, nodes, source_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_FILES_IN_A_FOLDER = 15
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


def test_no_folder_has_too_many_files() -> None:
    folders = Counter(str(path.parent) for path in source_files() if path.name not in ("__init__.py", "__main__.py"))
    assert {folder: count for folder, count in folders.items() if count > MAX_FILES_IN_A_FOLDER} == {}


def test_no_class_name_has_two_meanings() -> None:
    names = Counter(node.name for _, node in nodes() if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


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
