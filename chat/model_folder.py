"""What a Hugging Face model folder says: its JSON files, tokenizer, chat template, end-of-sequence ids."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

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


def read_core(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise UserError(f"no tokenizer at {path}: model.path must be a Hugging Face folder with tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception; a file it cannot read is the user's to mend
        raise UserError(f"tokenizer {path} cannot be read: {error}") from error


def template_source(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):  # the form with several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise UserError(f"no chat template in {folder}: add chat_template.jinja")
    return source


def token_text(value: object) -> str | None:
    """A special token is written as its text or as an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def read_eos_ids(folder: Path, core: tokenizers.Tokenizer, special: Mapping[str, str]) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        ids = read_json_object(folder / name).get("eos_token_id")
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    token_id = core.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if token_id is None:
        raise UserError(f"no eos_token_id in {folder}: add it to generation_config.json")
    return frozenset([token_id])
