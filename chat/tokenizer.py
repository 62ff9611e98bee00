"""`Tokenizer`: text to token ids and back, and the chat template, from a Hugging Face folder without transformers.

Nothing here adds special tokens by itself: what the template writes is what the model sees.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers

from chat.errors import ChatTemplateError
from chat.images.reader import ImageReader, read_image_reader
from chat.model_folder import read_core, read_eos_ids, read_json_object, template_source, token_text
from chat.templates import ChatTemplate, Message
from runtime.errors import UserError

Int32s = npt.NDArray[np.int32]
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
        """What turns images into patches and tokens; `None` for a model of text."""
        self.eos_ids = eos_ids
        """Ids that end a completion."""
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        """Number of ids the tokenizer knows; a model may have a few more rows."""

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json`, chat template, end-of-sequence ids and, of a model that sees, the image processor.

        Raises `UserError` naming what is missing.
        """
        core = read_core(folder / "tokenizer.json")
        settings = read_json_object(folder / "tokenizer_config.json")
        special = {name: text for name in SPECIAL_TOKENS if (text := token_text(settings.get(name))) is not None}
        try:
            template = ChatTemplate(template_source(folder, settings), special)
        except ChatTemplateError as error:
            raise UserError(f"model folder {folder}: {error}") from error
        images = read_image_reader(folder, core)
        return cls(core, template, read_eos_ids(folder, core, special), folder, images)

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
        text: str = self._core.decode(token_ids.tolist(), skip_special_tokens=skip_special_tokens)
        return text

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None = None) -> Int32s:
        """Prompt ids of a conversation that the assistant continues. Raises `ChatTemplateError`."""
        return self.encode(self.render(messages, tools=tools))
