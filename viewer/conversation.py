"""A saved rollout as people read it: roles and plain text, whatever shape the environment gave its messages."""

import json

import msgspec


class Said(msgspec.Struct, frozen=True):
    """One message."""

    role: str
    text: str


def conversation(messages: object) -> list[Said]:
    """Every message as text. Tool calls, and parts that are neither text nor pictures, are shown as JSON."""
    if not isinstance(messages, list):
        return []
    return [_said(message) for message in messages]


def split_prompt(said: list[Said]) -> tuple[list[Said], list[Said]]:
    """(what the rollout began with, everything from the first answer on)."""
    first = next((place for place, message in enumerate(said) if message.role == "assistant"), len(said))
    return said[:first], said[first:]


def _said(message: object) -> Said:
    if not isinstance(message, dict):
        return Said("?", _text(message))
    extras = [name for name in ("reasoning_content", "tool_calls") if message.get(name)]
    parts = [_text(message.get("content")), *(f"{name}: {_text(message[name])}" for name in extras)]
    return Said(str(message.get("role", "?")), "\n".join(part for part in parts if part))


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    return json.dumps(content, ensure_ascii=False, default=str)


def _part(part: object) -> str:
    """A part of a message: its text, or a word for a picture, whose bytes would fill the page."""
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and "image" in str(part.get("type", "")):
        return "[image]"
    return json.dumps(part, ensure_ascii=False, default=str)
