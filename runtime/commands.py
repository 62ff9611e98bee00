"""Commands of `rl` that other packages bring, found through the entry-point group `tandem.commands`."""

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

GROUP = "tandem.commands"
Command = Callable[[Sequence[str]], int]
"""Takes the arguments after its name, returns the exit code."""


def find_command(name: str) -> Command | None:
    """The command of that name; `None` if no installed package brings one."""
    found = entry_points(group=GROUP, name=name)
    if not found:
        return None
    command: Command = next(iter(found)).load()
    return command
