"""Raw config data, before validation: nested dicts, addressed by dotted keys. All functions are pure."""

from pydantic import BaseModel
from pydantic.fields import FieldInfo

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
