"""The index in `tests/support/__init__.py` has a line for every module below `tests/` that is not a test file."""

from collections.abc import Iterator

import tests.support
from tests.architecture.sources import ROOT

NOT_HELPERS = ("test_*.py", "__init__.py")


def index() -> Iterator[tuple[str, str]]:
    """Every module that the index names, and what it says of it."""
    folder = ""
    for line in (tests.support.__doc__ or "").splitlines():
        if line.startswith("tests/"):
            folder = line
        elif line.startswith("    "):
            name, _, gives = line.strip().partition("  ")
            yield folder + name, gives


def test_index_has_every_helper_module_and_no_other() -> None:
    modules = {path for path in (ROOT / "tests").rglob("*.py") if not any(map(path.match, NOT_HELPERS))}
    assert sorted(name for name, _ in index()) == sorted(path.relative_to(ROOT).as_posix() for path in modules)


def test_index_says_what_each_module_gives() -> None:
    assert [name for name, gives in index() if not gives] == []
