"""`Placeholders`: the tokens that stand for images, and their expansion.

The template writes one `<|image_pad|>` per image, between its start and end tokens; the model wants as many as the
image has merged patches. Hugging Face repeats the text before it is tokenized, here the id is repeated afterwards:
special tokens are never merged with their neighbours, so the ids are the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chat.errors import ImageError
from chat.images.patches import ImagePatches

IMAGE_TYPE = 1
UInt8s = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Ids and texts of the tokens that stand for images in one model."""

    image_id: int
    texts: Mapping[str, int]
    """Text to id of every token that stands for media: images and videos."""
    merge_size: int
    """A token stands for this many patches, squared."""

    def expand(self, token_ids: Int32s, images: Sequence[ImagePatches]) -> tuple[Int32s, UInt8s]:
        """Token ids with a token per merged patch, and the modality of each. Raises `ImageError` unless there is
        exactly one placeholder per image."""
        places = np.flatnonzero(token_ids == self.image_id)
        sizes = [patches // self.merge_size**2 for part in images for patches in part.num_patches]
        if len(places) != len(sizes):
            raise ImageError(f"the prompt has {len(places)} placeholders for {len(sizes)} images")
        self.check_no_video(token_ids)
        repeats = np.ones(len(token_ids), np.int64)
        repeats[places] = sizes
        expanded = np.repeat(token_ids, repeats)
        return expanded, (expanded == self.image_id).astype(np.uint8) * np.uint8(IMAGE_TYPE)

    def check_no_video(self, token_ids: Int32s) -> None:
        """Raise `ImageError` if an id stands for media other than images."""
        others = [token_id for token_id in self.texts.values() if token_id != self.image_id]
        if np.isin(token_ids, others).any():
            raise ImageError("the prompt has the placeholder of a video; only images are supported")

    def check_text(self, messages: Sequence[Mapping[str, object]]) -> None:
        """Raise `ImageError` if what someone wrote contains a placeholder: it would steal an image's features.

        What the assistant said is left out: it is not tokenized again, and where it is, `expand` counts.
        """
        for message in messages:
            for text in _texts(message.get("content")) if message.get("role") != "assistant" else ():
                found = next((placeholder for placeholder in self.texts if placeholder in text), None)
                if found is not None:
                    raise ImageError(f"the text of a message contains {found!r}, which stands for an image or video")

    def sampled(self, token_ids: Int32s) -> str | None:
        """The first placeholder among tokens that the policy sampled, if there is one."""
        return next((text for text, token_id in self.texts.items() if (token_ids == token_id).any()), None)


def _texts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                yield part["text"]
