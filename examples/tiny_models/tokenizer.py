"""A tokenizer with one token per character, and Qwen's chat markers.

Encoding and decoding are exact inverses on printable ASCII, newlines and the markers, token by token: any list of ids
decodes to a text that encodes to the same ids. Other characters become `<|unk|>`.
"""

import string
from importlib.resources import files

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, START, END = "<|endoftext|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, UNKNOWN, START, END)
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
VISION = (VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
CHARACTERS = "\n " + string.ascii_letters + string.digits + string.punctuation


def build_tokenizer(*, vision: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template; `len()` of it is the model's vocabulary size. With `vision` it also has
    Qwen's markers for images and videos."""
    extra = VISION if vision else ()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_character_tokenizer(extra),
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[START, *extra],
        clean_up_tokenization_spaces=False,
    )
    template = "vision_chat_template.jinja" if vision else "chat_template.jinja"
    tokenizer.chat_template = (files("tiny_models") / template).read_text()
    return tokenizer


def _character_tokenizer(extra: tuple[str, ...]) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS, *extra))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    special = [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *extra)]
    tokenizer.add_special_tokens(special)
    return tokenizer
