"""A folder that looks like a checkout of the repository, with one short real run in it."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT, Text, blocks

RUN = Path("runs") / "copy-text"
FIRST_RUN = "rl @ configs/copy_text/rl.toml"
"""The command of the quick start that really runs."""
NUM_STEPS = 30
"""The reward rises from 0.22 to 0.61 in them (measured); `test_circle` asks for a rise of 0.25."""
SHORTER = ("--max-steps", str(NUM_STEPS), "--trainer-ranks", "2")
OUTPUT = "output"
_OWN = {"runs", "models"}
_MODULE = re.compile(r"^# (\w+\.py)\n")


def environment(home: Path) -> dict[str, str]:
    """As after `source .venv/bin/activate`, one thread per process, caches in `home`."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    given = {"PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "XDG_CACHE_HOME": str(home / "cache")}
    return {**os.environ, **given, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def lay_out(folder: Path) -> None:
    """Links to what the repository holds, and the modules that examples of the documentation name."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name not in _OWN:
            (folder / entry.name).symlink_to(entry)
    for name, text in example_modules():
        (folder / name).write_text(text)


def example_modules() -> list[tuple[str, str]]:
    """Python blocks whose first line names their file."""
    return [(match[1], block.text) for block in blocks("python") if (match := _MODULE.match(block.text))]


def train(folder: Path, model: Path) -> None:
    """The first run of the quick start in `folder`, shortened, with two FSDP ranks. It finds `model` in its place."""
    lay_out(folder)
    (folder / "models").mkdir()
    (folder / "models" / RUN.name).symlink_to(model)
    command = [str(Path(sys.executable).parent / "rl"), *FIRST_RUN.split()[1:], *SHORTER]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    (folder / OUTPUT).write_text(done.stdout)


def borrow(folder: Path, trained: Path, command: Text) -> None:
    """Give `folder` the model and the run of `trained`, under every name that the command has for a run."""
    (folder / "models").symlink_to(trained / "models")
    (folder / "runs").mkdir()
    for name in {RUN.name, *re.findall(r"runs/([\w-]+)", command.text)}:
        (folder / "runs" / name).symlink_to(trained / RUN)
