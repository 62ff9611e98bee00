"""`ChatTemplate`: messages to text, in Hugging Face's sandbox; and where one conversation extends another."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chat.errors import ChatTemplateError

Message = Mapping[str, object]
"""An OpenAI chat message: `role`, `content` and whatever else the template reads."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for others; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it without ClassVar

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. Rendering equals `transformers`' `apply_chat_template(..., tokenize=False)`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the template's variables `bos_token`, `eos_token`, ... Raises `ChatTemplateError`."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as text. Raises `ChatTemplateError` with the template's own words."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


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
