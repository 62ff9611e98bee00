"""A config mistake as one line that names the key and, for an unknown one, the nearest known."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

from pydantic import ValidationError
from pydantic_config import ConfigFileError
from pydantic_core import ErrorDetails

from runtime.config.keys import ConfigClass, config_keys, key_of

MAX_VALUE_CHARS = 80
"""Longer values are cut in messages."""
REMOVED_KEYS = {
    "metrics.wandb.init_timeout_s": "WANDB_INIT_TIMEOUT_S in runtime/metrics/metric_log.py",
    "end_timeout_s": "END_TIMEOUT_S in runtime/launch/launcher.py",
    "concurrency_period_s": "PERIOD_S in orchestrator/policy/concurrency.py",
    "error_window": "ERROR_WINDOW in orchestrator/groups/scoring.py",
    "engines.dns_interval_s": "DNS_INTERVAL_S in orchestrator/engines/http_engine.py",
    "envs[].worker_start_timeout_s": "START_TIMEOUT_S in orchestrator/envs/workers/env.py",
    "envs[].max_worker_restarts": "MAX_RESTARTS in orchestrator/envs/workers/env.py",
    "torch.max_waiting": "MAX_WAITING in inference/api/engine.py",
    "vllm.max_waiting": "MAX_WAITING in inference/api/engine.py",
    "vllm.max_restarts": "MAX_RESTARTS in inference/vllm_engine/supervisor.py",
    "server.request_timeout_s": "REQUEST_TIMEOUT_S in inference/api/handlers.py",
    "data.fake.sigma": "SIGMA in trainer/batches/fake.py",
    "data.fake.group_size": "GROUP_SIZE in trainer/batches/fake.py",
}
"""Keys that are constants now, by their names in the config of a service: where each of them lies."""


def describe_config_error(error: ConfigFileError, config_class: ConfigClass) -> str:
    """All mistakes behind `error`, separated by semicolons."""
    if isinstance(error.__cause__, ValidationError):
        return describe_validation_error(error.__cause__, config_class)
    message = " ".join(str(error).split())
    return f"{message}; a key is set as --key value, a file given as @ FILE" if _is_stray(message) else message


def describe_validation_error(error: ValidationError, config_class: ConfigClass) -> str:
    """All mistakes in `error`, separated by semicolons.

    A shared key of `rl` is wrong in every service it flows into: it is reported once, where the user wrote it.
    """
    found: list[str] = []
    for details in _primary(error.errors()):
        mistake = _describe(details, config_class)
        if not any(mistake.endswith(f".{known}") for known in found):
            found.append(mistake)
    return "; ".join(found)


def _is_stray(message: str) -> bool:
    return message.startswith("Unrecognized arguments")


def removed_key(unknown: str) -> str | None:
    """The constant that took the place of a key, which `rl` has below the name of a service."""
    name = f".{_without_index(unknown)}"
    return next((constant for removed, constant in REMOVED_KEYS.items() if name.endswith(f".{removed}")), None)


def nearest_key(unknown: str, known: Iterable[str]) -> str:
    """The known key most like `unknown`: by the whole dotted name, or by its last part in another table."""
    return max(known, key=lambda key: (_likeness(_without_index(unknown), key), -len(key)))


def _without_index(key: str) -> str:
    return re.sub(r"\[\d+\]", "[]", key)


def _likeness(left: str, right: str) -> float:
    whole = SequenceMatcher(None, left, right).ratio()
    last = SequenceMatcher(None, left.rsplit(".", 1)[-1], right.rsplit(".", 1)[-1]).ratio()
    return max(whole, 0.95 * last)


def _primary(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without "too short" of a list whose items were refused: that only follows from it."""
    refused = {error["loc"][:end] for error in errors for end in range(len(error["loc"]))}
    return [error for error in errors if error["type"] != "too_short" or error["loc"] not in refused]


def _describe(details: ErrorDetails, config_class: ConfigClass) -> str:
    key = key_of(details["loc"], config_class)
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        known = {known_key.name for known_key in config_keys(config_class)}
        if _without_index(key) in known:  # a table with a `type`: the key belongs to another one
            return f"{key} does not go with {key.rpartition('.')[0]}.type = {str(details['loc'][-2])!r}"
        if constant := removed_key(key):
            return f"unknown key {key}; it is a constant now ({constant}): remove it"
        return f"unknown key {key}; did you mean {nearest_key(key, known)}?"
    if kind == "missing":
        return f"{_first_required(key, config_class)} is required"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{key}: expected a table, got {_show(value)}"
    if kind in ("tuple_type", "list_type"):
        if isinstance(value, dict):
            has_tables = any(known.name.startswith(f"{key}[].") for known in config_keys(config_class))
            entry = f"[[{key}]] begins an entry" if has_tables else f"{key.rpartition('.')[2]} = [...] gives it"
            return f"{key} is a list: in a file {entry}, a flag gives the whole list as JSON"
        return f"{key}: expected a list, got {_show(value)}"
    message = details["msg"].removeprefix("Value error, ")
    if not key:
        return message
    is_scalar = isinstance(value, str | int | float | bool)
    return f"{key}: {message}" + (f", got {_show(value)}" if is_scalar else "")


def _first_required(key: str, config_class: ConfigClass) -> str:
    """A missing table is missing its required keys: name the first, so that the user can set it."""
    inside = (known.name for known in config_keys(config_class) if not known.is_table and known.field.is_required())
    return next((name for name in inside if name.startswith(f"{key}.")), key)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."
