"""Columns of saved rollouts: `trajectory` and `sampling_args` always, and fields of the state that the config names.

They are turned into JSON when the rollout is scored, not when its batch is saved: a column that is missing or cannot be
written stops the run at the first rollout, and no foreign object is kept in memory or changed meanwhile.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel

from orchestrator.errors import StateColumnError

REQUIRED_COLUMNS = ("trajectory", "sampling_args")
"""Saved with every rollout, first."""


def saved_columns(extra: Sequence[str]) -> tuple[str, ...]:
    """All columns of an environment: required ones first, duplicates dropped, order kept."""
    return tuple(dict.fromkeys((*REQUIRED_COLUMNS, *extra)))


def read_columns(env_name: str, extra: Sequence[str], state: Mapping[str, Any]) -> dict[str, bytes]:
    """The columns that come from the state, as JSON. Raises `StateColumnError` with the column's name."""
    names = [name for name in saved_columns(extra) if name not in REQUIRED_COLUMNS]
    return {name: _encode(env_name, name, state) for name in names}


def _encode(env_name: str, name: str, state: Mapping[str, Any]) -> bytes:
    if name not in state:
        known = ", ".join(sorted(state)) or "no fields"
        raise StateColumnError(
            f"env {env_name!r}: its state has no column {name!r} (it has {known}); change envs[].state_columns"
        )
    try:
        return msgspec.json.encode(state[name], enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StateColumnError(
            f"env {env_name!r}: state column {name!r} cannot be saved as JSON ({error}); change envs[].state_columns"
        ) from error


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"it holds a {type(value).__name__}")
