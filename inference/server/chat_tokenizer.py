"""`ChatTokenizer`: messages to token ids and back, with the tokenizer of the model's folder."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
import numpy as np
from transformers import AutoTokenizer

from inference.errors import BadRequest
from inference.generation import Int32s


class ChatTokenizer:
    """Safe to use from the event loop and from the engine's thread."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()  # fast tokenizers refuse to be used by two threads at once
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            self._missing = "" if self._tokenizer.chat_template else f"the tokenizer in {path} has no chat template"
        except (OSError, ValueError) as error:
            self._tokenizer = None
            self._missing = f"there is no tokenizer in {path}: {error}"

    def encode_chat(self, messages: Sequence[Mapping[str, object]], template_kwargs: Mapping[str, object]) -> Int32s:
        """Tokens of the conversation, up to where the assistant speaks. Raises `BadRequest`."""
        if self._missing:
            raise BadRequest(f"chat is not possible: {self._missing}")
        try:
            with self._lock:
                ids = self._tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, return_dict=False, **template_kwargs
                )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadRequest(f"the chat template refuses these messages: {error}") from error
        return np.asarray(ids, dtype=np.int32)

    def decode(self, token_ids: Int32s) -> str:
        """Text of `token_ids`, without special tokens."""
        with self._lock:
            text: str = self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token, also of a special one."""
        with self._lock:
            text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text
