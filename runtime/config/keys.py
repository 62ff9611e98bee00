"""The dotted keys of a config class (`run.name`, `envs[].id`), and raw config data addressed by them."""

import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ConfigClass: TypeAlias = type[BaseModel]
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class AdvancedKey:
    """Metadata of a field: `--help` leaves the key out, `--help-all` and docs/configuration.md have it."""

    members: frozenset[str] = frozenset()
    """Of a table: its dotted keys that are meant. Empty: the key itself and all that it holds."""


Advanced = Annotated[ValueT, AdvancedKey()]
"""`stall_timeout_s: Advanced[float]`: in no shipped config, and nobody looks for it in the first week."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key, as it stands in a TOML file."""

    name: str
    field: FieldInfo
    is_table: bool
    """True for a key that only holds other keys."""
    is_advanced: bool
    """True for a key that `--help` leaves out."""
    default: object
    """What it is if nobody sets it; `None` also for one that must be set (`field.is_required()`)."""


def config_keys(config_class: ConfigClass) -> Iterator[Key]:
    """All keys of `config_class` and of the classes it holds, tables before their members."""
    for name, field in config_class.model_fields.items():
        inner = inner_classes(field.annotation)
        marks = [mark.members for mark in field.metadata if isinstance(mark, AdvancedKey)]
        is_advanced = frozenset() in marks
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        yield Key(name, field, bool(inner), is_advanced, default)
        separator = "[]." if is_sequence(field.annotation) else "."
        for inner_class in inner:
            for member in config_keys(inner_class):
                yield replace(
                    member,
                    name=f"{name}{separator}{member.name}",
                    is_advanced=is_advanced or member.is_advanced or any(member.name in members for members in marks),
                    default=_default_in(default, member) if isinstance(default, inner_class) else member.default,
                )


def _default_in(table: object, member: Key) -> object:
    """The default of `member` where its table is `table` by default: `HealthConfig(port=9101)` sets `health.port`."""
    *path, last = member.name.split(".")
    for name in path:
        table = getattr(table, name, None)
    return getattr(table, last) if isinstance(table, BaseModel) and last in type(table).model_fields else member.default


def inner_classes(annotation: object) -> list[ConfigClass]:
    """The config classes in an annotation: `A`, `A | None`, `A | B`, `tuple[A, ...]`, `Annotated[A, ...]`."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return [annotation] if issubclass(annotation, BaseModel) else []
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        arguments = arguments[:1]
    return [found for argument in arguments for found in inner_classes(argument)]


def is_sequence(annotation: object) -> bool:
    """True for `list[...]` and `tuple[...]`, also if optional."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return any(is_sequence(argument) for argument in get_args(annotation))
    return origin in (list, tuple)


def key_of(location: tuple[int | str, ...], config_class: ConfigClass) -> str:
    """The key that a pydantic location means: `("envs", 0, "id")` is `envs[0].id`; tags of unions are left out."""
    name, classes = "", [config_class]
    for segment in location:
        if isinstance(segment, int):
            name += f"[{segment}]"
            continue
        field = next((cls.model_fields[segment] for cls in classes if segment in cls.model_fields), None)
        if field is None and len(classes) > 0 and segment != location[-1]:
            continue  # the tag of a union, as pydantic writes it between two keys
        name += f".{segment}" if name else segment
        classes = inner_classes(field.annotation) if field is not None else []
    return name


Tree = dict[str, object]


def merge(base: Tree, over: Tree) -> Tree:
    """`base` with the values of `over`, table by table."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def set_value(data: Tree, key: str, value: object) -> Tree:
    """`data` with `key` set."""
    head, _, rest = key.partition(".")
    if not rest:
        return {**data, head: value}
    inner = data.get(head, {})
    return {**data, head: set_value(inner, rest, value)} if isinstance(inner, dict) else data


def get_value(data: Tree, config_class: type[BaseModel] | None, key: str) -> object:
    """The value of `key` in `data`, else its default in `config_class` (if given), else `None`."""
    head, _, rest = key.partition(".")
    field = config_class.model_fields.get(head) if config_class is not None else None
    if head not in data:
        default = (
            field.get_default(call_default_factory=True) if field is not None and not field.is_required() else None
        )
        return _attribute(default, rest)
    value = data[head]
    if not rest:
        return value
    return get_value(value, _table_class(field), rest) if isinstance(value, dict) else None


def _table_class(field: FieldInfo | None) -> type[BaseModel] | None:
    annotation = field.annotation if field is not None else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _attribute(value: object, path: str) -> object:
    for name in filter(None, path.split(".")):
        value = getattr(value, name, None)
    return value
