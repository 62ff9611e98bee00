"""Every command in README.md and docs/*.md works: run against one short real run, or dry-run (`execution.py`)."""

import importlib
import sys
from pathlib import Path

import pytest

from runtime.errors import UserError
from tests.docs.execution import MENTIONS, execute, split
from tests.docs.pages import ROOT, Text, commands
from tests.docs.workspace import FIRST_RUN, borrow, environment, example_modules, lay_out

pytestmark = pytest.mark.integration
COMMANDS = [command for command in commands() if command.text not in MENTIONS]


@pytest.fixture
def no_example_modules_left() -> None:
    """Modules of the documentation are imported from another folder by every test."""
    for name, _ in example_modules():
        sys.modules.pop(name.removesuffix(".py"), None)
    importlib.invalidate_caches()


@pytest.mark.parametrize("command", COMMANDS, ids=str)
@pytest.mark.usefixtures("no_example_modules_left")
def test_documented_command_works(
    command: Text, first_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path)
    borrow(tmp_path, first_run, command)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", environment(tmp_path)["XDG_CACHE_HOME"])
    monkeypatch.syspath_prepend(tmp_path)
    execute(split(command.text))


def test_the_run_that_was_really_made_is_that_of_the_quick_start() -> None:
    assert FIRST_RUN in [command.text for command in COMMANDS if command.page in ("README.md", "quick-start.md")]


def test_a_key_that_does_not_exist_is_found() -> None:
    file = ROOT / "configs" / "copy_text" / "orchestrator.toml"
    with pytest.raises(UserError, match="stepps"):
        execute(["orchestrator", "@", str(file), "--max-stepps", "3"])
