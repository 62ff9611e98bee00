"""`ImageReader`: from messages with pictures to messages with digests, and the patches of each picture.

A picture is processed once as long as anybody holds its patches: the rollouts of a group, which see the same pictures,
share them, and so do the turns of one rollout. Nothing is kept beyond that.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.images.message_parts import Message, decoded, digest_of, image_urls, with_digests
from orchestrator.images.patches import PatchMaker
from orchestrator.images.pictures import Pictures, PictureShelf, joined
from orchestrator.images.placeholders import Placeholders
from transport.wire.tensor import EncodedTensor


@dataclass(frozen=True, slots=True)
class Seen:
    """Messages without pixels, and the pictures that they name."""

    messages: Sequence[Message]
    pictures: Mapping[str, Pictures]
    """By digest."""


class ImageReader:
    """The image processor of one model. Belongs to one event loop; `join` may be called from any thread."""

    def __init__(self, maker: PatchMaker, placeholders: Placeholders) -> None:
        self.placeholders = placeholders
        self._maker = maker
        self.shelf = PictureShelf()
        self._working = asyncio.Lock()

    async def read(self, messages: Sequence[Message]) -> Seen:
        """Process what is not held yet. Raises `ImageError`."""
        self.placeholders.check_text(messages)
        pictures: dict[str, Pictures] = {}
        for url in image_urls(messages):
            digest = digest_of(url)
            pictures[digest] = pictures.get(digest) or await self._picture(digest, url)
        return Seen(with_digests(messages) if pictures else messages, pictures)

    def join(self, parts: Sequence[Pictures]) -> Pictures:
        """All pictures of `parts`, in order. Equal rows of pictures share their memory."""
        key = tuple(digest for part in parts for digest in part.digests)
        held = self.shelf.get(key)
        return held if held is not None else self._hold(joined(list(parts)))

    async def _picture(self, digest: str, url: str) -> Pictures:
        """Processed off the event loop, one at a time."""
        if (held := self.shelf.get((digest,))) is not None:
            return held
        async with self._working:
            held = self.shelf.get((digest,))
            return held if held is not None else self._hold(await asyncio.to_thread(self._process, digest, url))

    def _hold(self, pictures: Pictures) -> Pictures:
        return self.shelf.setdefault(pictures.digests, pictures)

    def _process(self, digest: str, url: str) -> Pictures:
        cut = self._maker.cut(decoded(url))
        grid = np.array([[1, cut.height, cut.width]], np.int64)
        return Pictures((digest,), EncodedTensor.of(cut.patches), EncodedTensor.of(grid))
