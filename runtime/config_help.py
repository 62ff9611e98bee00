"""`--help` of a service: every key with type, default and meaning.

The library can print help, too, but reads the source of every class of every base for it, which takes seconds.
"""

import inspect
import shutil
import textwrap
from collections.abc import Iterator

from runtime.config_keys import ConfigClass, Key
from runtime.config_reference import default_text, keys_by_table, type_name

MAX_FLAG_CHARS = 44
"""Longer flags get a line of their own."""


def config_help(config_class: ConfigClass, prog: str, width: int | None = None) -> str:
    """The help text, `width` columns wide (by default as the terminal, at most 120)."""
    width = width or min(shutil.get_terminal_size().columns, 120)
    lines = [f"usage: {prog} [@ file.toml] [--key value ...]", "", inspect.cleandoc(config_class.__doc__ or ""), ""]
    lines.append("Later files and flags win. `--no-key` turns a switch off.")
    for table, keys in keys_by_table(config_class):
        lines += ["", f"[{table}]" if table else "Keys"]
        for key in keys:
            lines += _entry(key, width)
    return "\n".join(lines) + "\n"


def _entry(key: Key, width: int) -> Iterator[str]:
    flag = "  --" + key.name.replace("_", "-")
    kind = "" if key.field.annotation is bool else f" ({type_name(key.field.annotation)})"
    meaning = f"{' '.join((key.field.description or '').split())}{kind} [{default_text(key)}]"
    indent = " " * (MAX_FLAG_CHARS + 2)
    wrapped = textwrap.wrap(meaning, max(width - len(indent), 30), break_on_hyphens=False)
    if len(flag) > MAX_FLAG_CHARS:
        yield flag
    else:
        yield flag.ljust(len(indent)) + wrapped.pop(0)
    yield from (indent + line for line in wrapped)
