"""The files of the page: plain HTML, CSS and JavaScript modules, served as they are, or joined into one document."""

import re
from functools import cache
from importlib.resources import files

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
MAIN = "main.js"
_IMPORT = re.compile(r"^import\s+\{[^}]*\}\s+from\s+\"\./([a-z_]+\.js)\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function|const|class)", re.MULTILINE)


@cache
def assets() -> dict[str, str]:
    found = [entry for entry in files("viewer").joinpath("static").iterdir() if content_type(entry.name)]
    return {entry.name: entry.read_text(encoding="utf-8") for entry in found}


def content_type(name: str) -> str:
    """The media type of a file of the page; empty for anything else."""
    return TYPES.get("." + name.rpartition(".")[2], "")


def bundle() -> str:
    """All modules as one script, each after those it imports: a file that is opened offline cannot import.

    The modules share one scope then, so no two may use the same top-level name (a test holds that).
    """
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for needed in _IMPORT.findall(assets()[name]):
                visit(needed)
            order.append(name)

    visit(MAIN)
    return "\n".join(f"// {name}\n" + _EXPORT.sub("", _IMPORT.sub("", assets()[name])) for name in order)
