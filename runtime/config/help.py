"""The keys of a config class for people: the text of `--help`, and Markdown for docs.

The library can print help, too, but reads the source of every class of every base for it, which takes seconds.
"""

import inspect
import shutil
import textwrap
import types
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from runtime.config.keys import ConfigClass, Key, config_keys

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


def config_reference(config_class: ConfigClass) -> str:
    """A heading and a table of keys for each config table, in the order of the class."""
    tables = {key.name: key.field.description or "" for key in config_keys(config_class) if key.is_table}
    sections = []
    for table, keys in keys_by_table(config_class):
        heading = [f"### `[{table}]`", "", tables.get(table.removesuffix("[]"), ""), ""] if table else []
        sections.append(
            "\n".join([*heading, "| key | type | default | meaning |", "|---|---|---|---|", *map(_reference_row, keys)])
        )
    return "\n\n".join(sections) + "\n"


def keys_by_table(config_class: ConfigClass) -> Iterator[tuple[str, list[Key]]]:
    """`("optimizer", [keys of it])` for each table; the keys of the top level first, under the empty name."""
    leaves = [key for key in config_keys(config_class) if not key.is_table]
    leaves.sort(key=lambda key: "." in key.name)  # stable: tables keep the order of the class
    for table, keys in groupby(leaves, key=lambda key: key.name.rpartition(".")[0]):
        yield table, list(keys)


def type_name(annotation: object) -> str:
    """An annotation for people: `int`, `"a" | "b"`, `list of str`, `path or none`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " | ".join(repr(argument).replace("'", '"') for argument in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(argument) for argument in arguments)
    if origin in (list, tuple):
        return f"list of {type_name(arguments[0])}" if arguments else "list"
    if annotation is type(None):
        return "none"
    if origin is dict or annotation is dict:
        return "table"
    name = getattr(annotation, "__name__", str(annotation))
    return name.lower() if name in ("Path", "Any") else name


def default_text(key: Key) -> str:
    """The default as it would stand in a TOML file; `required` if there is none."""
    if key.field.is_required():
        return "required"
    value: object = key.field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(f'"{item}"' if isinstance(item, str) else str(item) for item in value) + "]"
    return str(value) if isinstance(value, int | float | dict) else f'"{value}"'


def _reference_row(key: Key) -> str:
    cells = [f"`{key.name}`", type_name(key.field.annotation), f"`{default_text(key)}`", key.field.description or ""]
    return "| " + " | ".join(" ".join(cell.split()).replace(" | ", " \\| ") for cell in cells) + " |"
