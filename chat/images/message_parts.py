"""Image parts of chat messages: found, and replaced by what stands for them from then on.

A message keeps no pixels: its part becomes `{"type": "image", "image": DIGEST}`, which chat templates render like the
original and which is what conversations are compared by.
"""

import base64
import binascii
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import xxhash
from PIL import Image, ImageOps, UnidentifiedImageError

from chat.errors import ImageError

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 64 * 2**20
"""Larger images are refused before they are decoded."""

Message = Mapping[str, object]


def image_urls(messages: Sequence[Message]) -> Iterator[str]:
    """The URL of every image, in order. Raises `ImageError` for a part without one."""
    for message in messages:
        for part in _parts(message):
            if _is_image(part):
                yield _url(part)


def with_digests(messages: Sequence[Message]) -> list[Message]:
    """`messages` with a digest in the place of every image."""
    return [_mapped(message, lambda url: {"type": "image", "image": digest_of(url)}) for message in messages]


def digests(messages: Sequence[Message]) -> list[str]:
    """The digests in messages that went through `with_digests`, in order."""
    return [str(part["image"]) for message in messages for part in _parts(message) if part.get("type") == "image"]


def digest_of(url: str) -> str:
    """Which image a URL is: the same text is the same image."""
    return xxhash.xxh3_128_hexdigest(url.encode())


def decoded_image(url: str) -> Image.Image:
    """The image in a `data:` URL, upright. Raises `ImageError`, whatever Pillow raises."""
    try:
        return ImageOps.exif_transpose(_opened(url))
    except ImageError:
        raise
    except (
        binascii.Error,
        UnidentifiedImageError,
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
    ) as error:
        raise ImageError(f"an image cannot be read ({', '.join(FORMATS)} can): {error}") from error


def _opened(url: str) -> Image.Image:
    head, comma, body = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        raise ImageError(f"an image must be a base64 data URL, got {url[:40]!r}: nothing is fetched")
    image = Image.open(io.BytesIO(base64.b64decode(body, validate=True)), formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(f"an image of {image.width}x{image.height} is larger than {MAX_PIXELS} pixels")
    return image


def _parts(message: Message) -> Iterator[Mapping[str, Any]]:
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping):
            yield part


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("image", "image_url")


def _url(part: Mapping[str, Any]) -> str:
    """OpenAI writes `image_url: {url}`, templates of Hugging Face read `image` or `url`."""
    value = part.get("image_url") or part.get("image") or part.get("url")
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str):
        raise ImageError(f"an image part has no URL: its keys are {sorted(part)}")
    return url


def _mapped(message: Message, replace: Callable[[str], Mapping[str, str]]) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [replace(_url(part)) if isinstance(part, Mapping) and _is_image(part) else part for part in content]
    return {**message, "content": parts}
