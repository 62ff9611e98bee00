"""`ChatTokenizer`: messages to token ids and back."""

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jinja2
import numpy as np

from inference.errors import BadRequest
from inference.generation import Int32s

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatTokenizer:
    """Safe to use from the event loop and from the engine's thread. `missing` says why there is no chat."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None", *, missing: str = "") -> None:
        self._lock = threading.Lock()  # fast tokenizers refuse to be used by two threads at once
        self._tokenizer = tokenizer
        self._missing = missing

    def encode_chat(self, messages: Sequence[Mapping[str, object]], template_kwargs: Mapping[str, object]) -> Int32s:
        """Tokens of the conversation, up to where the assistant speaks. Raises `BadRequest`."""
        tokenizer = self._usable()
        try:
            with self._lock:
                ids = tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, return_dict=False, **template_kwargs
                )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadRequest(f"the chat template refuses these messages: {error}") from error
        if not isinstance(ids, list):  # an option of the tokenizer, not of the template: `tokenize`, `return_tensors`
            raise BadRequest("chat_template_kwargs must be variables of the chat template")
        return np.asarray(ids, dtype=np.int32)

    def decode(self, token_ids: Int32s) -> str:
        """Text of `token_ids`, without special tokens."""
        tokenizer = self._usable()
        with self._lock:
            text: str = tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token, also of a special one."""
        tokenizer = self._usable()
        with self._lock:
            text: str = tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _usable(self) -> "PreTrainedTokenizerBase":
        if self._tokenizer is None or self._missing:
            raise BadRequest(f"chat is not possible: {self._missing}")
        return self._tokenizer
