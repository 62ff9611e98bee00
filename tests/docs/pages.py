"""README.md and docs/*.md: their commands, code blocks and links."""

import re
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
