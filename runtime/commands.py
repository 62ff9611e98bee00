"""Commands of `rl` that other packages bring, found through the entry-point group `tandem.commands`."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points

GROUP = "tandem.commands"
OWN = ("doctor", "keys")
"""Commands that `rl` has without other packages."""
Command = Callable[[Sequence[str]], int]
"""Takes the arguments after its name, returns the exit code."""


def find_command(name: str) -> Command | None:
    """The command of that name; `None` if no installed package brings one."""
    found = entry_points(group=GROUP, name=name)
    if not found:
        return None
    command: Command = next(iter(found)).load()
    return command


def nearest_command(name: str) -> str | None:
    """The command that `name` was probably meant to be, if one is like it."""
    known = [*OWN, *(entry.name for entry in entry_points(group=GROUP))]
    return next(iter(get_close_matches(name, known, n=1)), None)
