"""What a page asks for, checked: everything arrives as text, from anyone who reaches the port."""

from collections.abc import Mapping, Sequence

from viewer.errors import ViewerError
from viewer.index.run_index import Value

Params = Mapping[str, str]
PAGE_ROWS = 50


def integer(params: Params, name: str) -> int | None:
    """A whole number; `None` if it is not given. Raises `ViewerError`."""
    text = params.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise ViewerError(f"{name} must be a whole number")
    return int(text)


def numbers(params: Params, name: str, count: int) -> list[int]:
    """`count` numbers joined by dots, as in the ids of rollouts and sequences. Raises `ViewerError`."""
    parts = params.get(name, "").split(".")
    if len(parts) != count or not all(part.isascii() and part.isdigit() and len(part) <= 15 for part in parts):
        raise ViewerError(f"{name} must be {count} numbers joined by dots")
    return [int(part) for part in parts]


def choice(params: Params, name: str, choices: Mapping[str, str], default: str) -> str:
    """What `choices` has for the value, or for `default`. Raises `ViewerError` naming the choices."""
    chosen = params.get(name) or default
    if chosen not in choices:
        raise ViewerError(f"{name} must be one of {', '.join(choices)}")
    return choices[chosen]


def page_offset(params: Params, page_rows: int = PAGE_ROWS) -> int:
    """Rows to skip for `page` (from 0)."""
    return (integer(params, "page") or 0) * page_rows


def filters(params: Params, conditions: Mapping[str, Sequence[Value]]) -> tuple[str, list[Value]]:
    """The `WHERE` clause for `env` and `step`, where given, and for `conditions` with their values; all values."""
    asked: Mapping[str, Value] = {"env_name = ?": params.get("env") or None, "step = ?": integer(params, "step")}
    found = {condition: [value] for condition, value in asked.items() if value is not None} | dict(conditions)
    where = f"WHERE {' AND '.join(found)}" if found else ""
    return where, [value for values in found.values() for value in values]
