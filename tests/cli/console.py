"""Command lines as users type them, in this process: `run(["rl", "doctor", RUN])`, `resolve(["trainer", ...])`."""

import io
import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

import inference.cli
import orchestrator.cli
import runtime.cli
import trainer.cli
import transport.cli

Words = Sequence[str]
Resolved = dict[str, Any]

CONSOLE: dict[str, Callable[[Words], int | None]] = {
    "inference": inference.cli.run,
    "orchestrator": orchestrator.cli.run,
    "rl": runtime.cli.run,
    "trainer": trainer.cli.run,
    "transport": transport.cli.main,
}
"""The functions behind the console scripts."""


def run(words: Words) -> str:
    """What the command prints. It must end with exit code 0; a mistake is raised as `UserError`."""
    code: object
    with redirect_stdout(io.StringIO()) as output:
        try:
            code = CONSOLE[words[0]](list(words[1:]))
        except SystemExit as stop:
            code = stop.code
    assert code in (0, None), f"{words} ended with {code}"
    return output.getvalue()


def resolve(words: Words) -> Resolved:
    """The config that the command would run with. Torchrun's own options go through its own parser."""
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        at = list(words).index("-m")
        get_args_parser().parse_args([*words[1:at], "script"])
        assert words[at + 1] == "trainer"
        words = words[at + 1 :]
    resolved: Resolved = json.loads(run([*words, *(() if "--dry-run" in words else ("--dry-run",))]))
    return resolved
