"""`Tokenizer`: text to token ids and back, and the chat template, from a Hugging Face folder without transformers.

Nothing here adds special tokens by itself: what the template writes is what the model sees.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from orchestrator.chat_template import ChatTemplate, ChatTemplateError, Message
from orchestrator.images.folder import read_image_reader
from orchestrator.images.reader import ImageReader
from orchestrator.json_file import read_json_object
from orchestrator.rollout import Int32s
from runtime.errors import UserError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Tokenizer and chat template of one model folder."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        template: ChatTemplate,
        eos_ids: frozenset[int],
        folder: Path,
        images: ImageReader | None = None,
    ) -> None:
        self.folder = folder
        """Where it was read from."""
        self._core = core
        self._template = template
        self.images = images
        """What turns pictures into patches and tokens; `None` for a model of text."""
        self.eos_ids = eos_ids
        """Ids that end a completion."""
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        """Number of ids the tokenizer knows; a model may have a few more rows."""

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json`, chat template, end-of-sequence ids and, of a model that sees, the image processor.

        Raises `UserError` naming what is missing.
        """
        core = _read_core(folder / "tokenizer.json")
        settings = read_json_object(folder / "tokenizer_config.json")
        special = {name: text for name in SPECIAL_TOKENS if (text := _token_text(settings.get(name))) is not None}
        try:
            template = ChatTemplate(_template_source(folder, settings), special)
        except ChatTemplateError as error:
            raise UserError(f"model folder {folder}: {error}") from error
        images = read_image_reader(folder, core)
        return cls(core, template, _eos_ids(folder, core, special), folder, images)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as text. Raises `ChatTemplateError`."""
        return self._template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def encode(self, text: str) -> Int32s:
        """Ids of `text`, special tokens written in it included."""
        return np.array(self._core.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, token_ids: Int32s, *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`."""
        text: str = self._core.decode(token_ids.tolist(), skip_special_tokens=skip_special_tokens)
        return text

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None = None) -> Int32s:
        """Prompt ids of a conversation that the assistant continues. Raises `ChatTemplateError`."""
        return self.encode(self.render(messages, tools=tools))


def _read_core(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise UserError(f"no tokenizer at {path}: model.path must be a Hugging Face folder with tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception; a file it cannot read is the user's to mend
        raise UserError(f"tokenizer {path} cannot be read: {error}") from error


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):  # the form with several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise UserError(f"no chat template in {folder}: add chat_template.jinja")
    return source


def _token_text(value: object) -> str | None:
    """A special token is written as its text or as an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _eos_ids(folder: Path, core: tokenizers.Tokenizer, special: Mapping[str, str]) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        ids = read_json_object(folder / name).get("eos_token_id")
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    token_id = core.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if token_id is None:
        raise UserError(f"no eos_token_id in {folder}: add it to generation_config.json")
    return frozenset([token_id])
