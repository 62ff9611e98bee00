"""Reading the JSON files of a model folder."""

import json
from pathlib import Path
from typing import Any

from runtime.errors import UserError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`; empty if there is no such file. Raises `UserError` for anything else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object")
    return content
