"""Command lines of deployment files, run through the real CLIs with `--dry-run`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IMAGE_ROOT = "/app/"
"""Where docker/Dockerfile puts the repository."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")

Resolved = dict[str, Any]


def resolve(service: str, arguments: Sequence[str]) -> Resolved:
    """The config that `service` would run with; fails with its own message if it would not start."""
    command = [sys.executable, "-m", service, *(_here(word) for word in arguments), "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    resolved: Resolved = json.loads(done.stdout)
    return resolved


def _here(word: str) -> str:
    return str(ROOT / word.removeprefix(IMAGE_ROOT)) if word.startswith(IMAGE_ROOT) else word


def substitute(text: str, environment: Mapping[str, str]) -> str:
    """`text` with `${NAME:-default}` replaced, as compose does it."""
    return _VARIABLE.sub(lambda match: environment.get(match[1]) or match[2] or "", text)


def variables(text: str) -> set[str]:
    """Names of all variables in `text`."""
    return {match[1] for match in _VARIABLE.finditer(text)}


def after_torchrun(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Torchrun's own options, the module that it runs, and that module's arguments."""
    at = list(words).index("-m")
    return list(words[:at]), words[at + 1], list(words[at + 2 :])


def check_torchrun(options: Sequence[str]) -> None:
    """Torchrun itself accepts the options."""
    code = "import sys; from torch.distributed.run import get_args_parser as p; p().parse_args([*sys.argv[1:], 'x'])"
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
