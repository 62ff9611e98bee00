"""Commands, code blocks and links of the documentation, and a folder like a checkout in which its commands run."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

PROGRAMS = (
    *("rl", "inference", "orchestrator", "trainer", "transport", "torchrun", "python", "tensorboard", "make", "pip"),
    *("docker", "openssl", "sbatch", "sky", "kubectl", "helm"),
)
"""A code span that begins with one of these and goes on is a command."""

_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)

_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")

_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Text:
    """A piece of a page: a command line, a block of code, or the target of a link."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0][:90]}"


def blocks(language: str) -> list[Text]:
    """All fenced blocks of that language."""
    return [
        Text(page.name, body) for page in PAGES for name, body in _FENCE.findall(page.read_text()) if name == language
    ]


def commands() -> list[Text]:
    """Every command line, where it stands first: of `sh` blocks, after a `$`, and in the running text."""
    first: dict[str, Text] = {}
    for page in PAGES:
        for found in _commands(page):
            first.setdefault(found.text, found)
    return list(first.values())


def _commands(page: Path) -> Iterator[Text]:
    text = page.read_text()
    for language, body in _FENCE.findall(text):
        lines = body.replace("\\\n", " ").splitlines()
        found = lines if language == "sh" else [line[2:] for line in lines if line.startswith("$ ")]
        yield from (Text(page.name, words) for line in found if (words := _without_comment(line)))
    for span in _SPAN.findall(_FENCE.sub("", text)):
        words = span.replace("\\|", "|").split()
        if len(words) > 1 and words[0] in PROGRAMS:
            yield Text(page.name, " ".join(words))


def _without_comment(line: str) -> str:
    """The command of a line, with single spaces; nothing if there is none."""
    return " ".join(re.sub(r"(^| )#.*", "", line).split())


def links() -> list[Text]:
    """Targets of all links that are not addresses of the web."""
    found = [Text(page.name, target) for page in PAGES for target in _LINK.findall(_FENCE.sub("", page.read_text()))]
    return [link for link in dict.fromkeys(found) if "://" not in link.text]


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
