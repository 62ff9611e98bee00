"""The source files of the packages, parsed once."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("transport", "chat", "orchestrator", "trainer", "inference", "runtime", "viewer")


@cache
def source_files() -> tuple[Path, ...]:
    """All Python files of the packages, relative to the repository."""
    return tuple(sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")))


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of one file."""
    return ast.parse((ROOT / path).read_text())


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    """Every node of every file."""
    for path in source_files():
        for node in ast.walk(parsed(path)):
            yield path, node


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""
