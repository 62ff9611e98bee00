"""Comparing conversations, and the text that a template puts between two turns of the assistant."""

import json
from collections.abc import Callable, Mapping, Sequence

from orchestrator.chat_template import ChatTemplateError, Message

Render = Callable[[Sequence[Message]], str]
"""Conversation to prompt text, generation prompt included."""

SENTINEL = "tandem-assistant-turn"


def normalized(message: Message) -> dict[str, object]:
    """The message as it is compared: clients disagree on whether an empty content is `""`, `null` or absent."""
    present = {key: value for key, value in message.items() if value is not None and value != []}
    return {**present, "content": _plain(present.get("content", ""))}


def extends(messages: Sequence[Message], recorded: Sequence[Message]) -> bool:
    """Whether `messages` (normalized) are `recorded` and at least one more."""
    return len(messages) > len(recorded) and list(messages[: len(recorded)]) == list(recorded)


def tail_after_assistant(render: Render, messages: Sequence[Message], position: int) -> str | None:
    """What the template writes after the content of `messages[position]`, up to where the assistant continues.

    The content itself is replaced, so no text that the policy sampled is ever rendered. `None` if the template does
    not show that message where it stands, which makes the conversation one that cannot be extended exactly.
    """
    sentinel = SENTINEL
    while any(sentinel in json.dumps(dict(message), default=str) for message in messages):
        sentinel += "-"
    marked = [*messages[:position], {**messages[position], "content": sentinel}, *messages[position + 1 :]]
    try:
        text = render(marked)
    except ChatTemplateError:
        return None
    _, found, tail = text.partition(sentinel)
    return tail if found and sentinel not in tail else None


def _plain(content: object) -> object:
    """A list of text parts is the same as their text."""
    if not isinstance(content, list) or not all(_is_text_part(part) for part in content):
        return content
    return "".join(str(part["text"]) for part in content)


def _is_text_part(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and "text" in part
