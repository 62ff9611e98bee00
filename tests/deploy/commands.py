"""Command lines of deployment files, as they would run in the image, through the real CLIs with `--dry-run`."""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from tests.cli import console
from tests.cli.console import Resolved, Words

ROOT = Path(__file__).parents[2]
IMAGE_ROOT = "/app/"
"""Where docker/Dockerfile puts the repository."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def resolve(words: Words) -> Resolved:
    """The config that a service would run with, started alone or by torchrun; fails if it would not start."""
    with contextlib.chdir(ROOT):
        return console.resolve([word.removeprefix(IMAGE_ROOT) for word in words])


def substitute(text: str, environment: Mapping[str, str]) -> str:
    """`text` with `${NAME:-default}` replaced, as compose does it."""
    return _VARIABLE.sub(lambda match: environment.get(match[1]) or match[2] or "", text)


def variables(text: str) -> set[str]:
    """Names of all variables in `text`."""
    return {match[1] for match in _VARIABLE.finditer(text)}
