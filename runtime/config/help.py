"""The keys of a config class for people: the text of `--help` and `--help-all`, and Markdown for docs.

The library can print help, too, but reads the source of every class of every base for it, which takes seconds.
"""

import inspect
import shutil
import textwrap
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from runtime.config.keys import ConfigClass, Key, config_keys

MAX_FLAG_CHARS = 44
"""Longer flags get a line of their own."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key as help and docs describe it."""

    name: str
    type: str
    default: str
    meaning: str
    is_advanced: bool


def config_help(config_class: ConfigClass, prog: str, width: int | None = None, *, with_advanced: bool = False) -> str:
    """The help text, `width` columns wide (by default as the terminal, at most 120)."""
    width = width or min(shutil.get_terminal_size().columns, 120)
    lines = [f"usage: {prog} [@ file.toml] [--key value ...]", "", inspect.cleandoc(config_class.__doc__ or ""), ""]
    lines.append("Later files and flags win. `--no-key` turns a switch off.")
    num_hidden = 0 if with_advanced else len({key.name for key in _leaves(config_class) if key.is_advanced})
    if num_hidden:
        lines.append(f"Advanced keys are hidden here: {num_hidden}. `{prog} --help-all` shows them, too.")
    for table, entries in entries_by_table(config_class):
        shown = [entry for entry in entries if with_advanced or not entry.is_advanced]
        if shown:
            lines += ["", f"[{table}]" if table else "Keys"]
        for entry in shown:
            lines += _lines(entry, width)
    return "\n".join(lines) + "\n"


def _lines(entry: Entry, width: int) -> Iterator[str]:
    flag = "  --" + entry.name.replace("_", "-")
    kind = "" if entry.type == "bool" else f" ({entry.type})"
    meaning = f"{entry.meaning}{kind} [{entry.default}]"
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
    for table, entries in entries_by_table(config_class):
        heading = [f"### `[{table}]`", "", tables.get(table.removesuffix("[]"), ""), ""] if table else []
        sections.append(
            "\n".join(
                [*heading, "| key | type | default | meaning |", "|---|---|---|---|", *map(_reference_row, entries)]
            )
        )
    return "\n\n".join(sections) + "\n"


def entries_by_table(config_class: ConfigClass) -> Iterator[tuple[str, list[Entry]]]:
    """`("optimizer", [keys of it])` for each table; the keys of the top level first, under the empty name."""
    tables: dict[str, list[Key]] = {"": []}
    for key in _leaves(config_class):
        tables.setdefault(key.name.rpartition(".")[0], []).append(key)
    return ((table, _entries(keys)) for table, keys in tables.items() if keys)


def _leaves(config_class: ConfigClass) -> Iterator[Key]:
    return (key for key in config_keys(config_class) if not key.is_table)


def _entries(keys: Iterable[Key]) -> list[Entry]:
    """One entry for each name: a table with a `type` has the keys of all its types, some of them several times.

    Those that have another default in another type keep an entry of their own.
    """
    alike: dict[tuple[str, str], list[Key]] = {}
    for key in keys:
        alike.setdefault((key.name, "" if _is_tag(key) else default_text(key)), []).append(key)
    return [
        Entry(
            name,
            " | ".join(dict.fromkeys(type_name(key.field.annotation) for key in same)),
            default_text(same[0]),
            " ".join(dict.fromkeys(" ".join((key.field.description or "").split()) for key in same)),
            all(key.is_advanced for key in same),
        )
        for (name, _), same in alike.items()
    ]


def _is_tag(key: Key) -> bool:
    """Whether the key tells which of several tables this is: it has one value."""
    return get_origin(key.field.annotation) is Literal and len(get_args(key.field.annotation)) == 1


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
    value = key.default
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(f'"{item}"' if isinstance(item, str) else str(item) for item in value) + "]"
    return str(value) if isinstance(value, int | float | dict) else f'"{value}"'


def _reference_row(entry: Entry) -> str:
    meaning = f"*Advanced.* {entry.meaning}" if entry.is_advanced else entry.meaning
    cells = [f"`{entry.name}`", entry.type, f"`{entry.default}`", meaning]
    return "| " + " | ".join(" ".join(cell.split()).replace(" | ", " \\| ") for cell in cells) + " |"
