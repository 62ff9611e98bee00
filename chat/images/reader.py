"""`ImageReader`: from messages with images to messages with digests, and the patches of each image.

An image is processed once as long as its patches are in use: the rollouts of a group, which see the same images,
share them, and so do the turns of one rollout. Nothing is kept beyond that.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers

from chat.images.message_parts import Message, decoded_image, digest_of, image_urls, with_digests
from chat.images.patches import ImageCache, ImagePatches, PatchMaker, PatchSettings, joined_patches
from chat.images.placeholders import Placeholders
from chat.model_folder import read_json_object
from runtime.errors import UserError
from transport.wire.sample import EncodedTensor


@dataclass(frozen=True, slots=True)
class ReadMessages:
    """Messages without pixels, and the images that they name."""

    messages: Sequence[Message]
    images: Mapping[str, ImagePatches]
    """By digest."""


class ImageReader:
    """The image processor of one model. Belongs to one event loop; `join` may be called from any thread."""

    def __init__(self, maker: PatchMaker, placeholders: Placeholders) -> None:
        self.placeholders = placeholders
        self._maker = maker
        self.cache = ImageCache()
        self._working = asyncio.Lock()

    async def read(self, messages: Sequence[Message]) -> ReadMessages:
        """Process what is not held yet. Raises `ImageError`."""
        self.placeholders.check_text(messages)
        images: dict[str, ImagePatches] = {}
        for url in image_urls(messages):
            digest = digest_of(url)
            images[digest] = images.get(digest) or await self._image(digest, url)
        return ReadMessages(with_digests(messages) if images else messages, images)

    def join(self, parts: Sequence[ImagePatches]) -> ImagePatches:
        """All images of `parts`, in order. Equal rows of images share their memory."""
        key = tuple(digest for part in parts for digest in part.digests)
        held = self.cache.get(key)
        return held if held is not None else self._hold(joined_patches(list(parts)))

    async def _image(self, digest: str, url: str) -> ImagePatches:
        """Processed off the event loop, one at a time."""
        if (held := self.cache.get((digest,))) is not None:
            return held
        async with self._working:
            held = self.cache.get((digest,))
            return held if held is not None else self._hold(await asyncio.to_thread(self._process, digest, url))

    def _hold(self, images: ImagePatches) -> ImagePatches:
        return self.cache.setdefault(images.digests, images)

    def _process(self, digest: str, url: str) -> ImagePatches:
        cut = self._maker.cut(decoded_image(url))
        grid = np.array([[1, cut.height, cut.width]], np.int64)
        return ImagePatches((digest,), EncodedTensor.of(cut.patches), EncodedTensor.of(grid))


PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")


def read_image_reader(folder: Path, core: tokenizers.Tokenizer) -> ImageReader | None:
    """The reader of the model in `folder`; `None` for a model of text. Raises `UserError` for a vision model whose
    images we cannot process exactly."""
    config = read_json_object(folder / "config.json")
    if "vision_config" not in config:
        return None
    settings = _settings(folder)
    placeholders = _placeholders(folder, config, core, settings.merge_size)
    return ImageReader(PatchMaker(settings), placeholders)


def _settings(folder: Path) -> PatchSettings:
    found = read_json_object(folder / "preprocessor_config.json") or read_json_object(
        folder / "processor_config.json"
    ).get("image_processor", {})
    kind = found.get("image_processor_type")
    if kind not in PROCESSORS:
        raise UserError(f"the image processor of {folder} is {kind!r}; supported are {', '.join(PROCESSORS)}")
    size = found.get("size") or {}
    edges = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
    merged = {**{name: edge for name, edge in edges.items() if edge}, **_present(found)}
    try:
        return msgspec.convert(merged, PatchSettings)
    except msgspec.ValidationError as error:
        raise UserError(f"preprocessor_config.json of {folder}: {error}") from error


def _present(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in PatchSettings.__struct_fields__ if found.get(name) is not None}


def _placeholders(folder: Path, config: Mapping[str, Any], core: tokenizers.Tokenizer, merge_size: int) -> Placeholders:
    ids = [config.get(f"{name}_token_id") for name in ("image", "video")]
    texts = {core.id_to_token(token_id) or "": token_id for token_id in ids if isinstance(token_id, int)}
    if not isinstance(ids[0], int) or "" in texts:
        raise UserError(f"the tokenizer of {folder} lacks the image or the video token of its config: ids {ids}")
    return Placeholders(ids[0], texts, merge_size)
