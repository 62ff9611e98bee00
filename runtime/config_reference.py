"""All keys of a config class as Markdown, for docs; `python -m runtime.config_reference` prints them all."""

import sys
import types
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from runtime.config_keys import ConfigClass, Key, config_keys

HEAD = """# Configuration

Every key of every service, made from the config classes by `python -m runtime.config_reference`; a test compares the
two. A key may stand in a TOML file (`service @ file.toml`) or on the command line (`--optimizer.lr 5e-4`); later ones
win, an unknown one is an error that names the nearest. `--dry-run` prints what is in force.

"""


def config_reference(config_class: ConfigClass) -> str:
    """A heading and a table of keys for each config table, in the order of the class."""
    tables = {key.name: key.field.description or "" for key in config_keys(config_class) if key.is_table}
    sections = []
    for table, keys in keys_by_table(config_class):
        heading = [f"### `[{table}]`", "", tables.get(table.removesuffix("[]"), ""), ""] if table else []
        sections.append(
            "\n".join([*heading, "| key | type | default | meaning |", "|---|---|---|---|", *map(_row, keys)])
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


def _row(key: Key) -> str:
    cells = [f"`{key.name}`", type_name(key.field.annotation), f"`{default_text(key)}`", key.field.description or ""]
    return "| " + " | ".join(" ".join(cell.split()).replace(" | ", " \\| ") for cell in cells) + " |"


def reference() -> str:
    """The page of `rl` and of every installed service."""
    from runtime.rl_config import RlConfig
    from runtime.services import find_services

    classes = {"rl": RlConfig} | {spec.name: spec.config_class for spec in find_services()}
    return HEAD + "\n".join(f"## `{name}`\n\n{config_reference(cls)}" for name, cls in classes.items())


if __name__ == "__main__":
    sys.stdout.write(reference())
