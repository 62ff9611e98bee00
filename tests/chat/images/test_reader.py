"""Images in messages: read once, shared, and refused with a reason."""

import asyncio
import gc
from pathlib import Path

import pytest

from chat.errors import ImageError
from chat.images.reader import ImageReader
from chat.tokenizer import Tokenizer
from tests.chat.images.drawn import data_url, draw, user, vision_folder

A, B = data_url(draw(1)), data_url(draw(2, 32, 16))
LARGE = data_url(draw(3, 256, 256))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_folder(vision_folder(tmp_path))


@pytest.fixture
def reader(tokenizer: Tokenizer) -> ImageReader:
    assert tokenizer.images is not None
    return tokenizer.images


async def copies_held(reader: ImageReader, url: str, num_rollouts: int) -> tuple[int, int]:
    """Different copies that so many rollouts at the same time get, and how many the reader knows of."""
    seen = await asyncio.gather(*(reader.read([user(url, "what?")]) for _ in range(num_rollouts)))
    return len({id(image) for each in seen for image in each.images.values()}), len(reader.cache)


async def test_rollouts_of_a_group_share_one_copy_of_their_image(reader: ImageReader) -> None:
    assert await copies_held(reader, LARGE, num_rollouts=8) == (1, 1)
    await asyncio.sleep(0)  # the turn of the loop that woke this test still holds what it waited for
    gc.collect()
    assert len(reader.cache) == 0, "what nobody holds is let go"


async def test_a_image_is_read_off_the_event_loop(reader: ImageReader) -> None:
    reading = asyncio.create_task(reader.read([user(A, "what?")]))
    await asyncio.sleep(0)  # on the spot, it would be read by now
    assert not reading.done()
    assert len((await reading).images) == 1


async def test_rows_of_images_share_their_memory(reader: ImageReader) -> None:
    seen = await reader.read([user(A, B)])
    parts = list(seen.images.values())
    joined = reader.join(parts)
    assert joined is reader.join(parts)
    assert reader.join(parts[:1]) is parts[0]
    assert joined.image_grid_thw.numpy().tolist() == [[1, 4, 4], [1, 4, 8]]
    assert joined.pixel_values.shape == (16 + 32, 48)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.com/cat.png", "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("data:text/plain;base64,aGVsbG8=", "base64 data URL"),
        ("data:image/png;base64,%%%", "cannot be read"),
        ("data:image/png;base64,aGVsbG8=", "cannot be read"),
        (A[: len(A) // 2], "cannot be read"),
        (data_url(draw(1), "BMP"), "cannot be read"),
    ],
)
async def test_bad_image_is_refused_with_a_reason(reader: ImageReader, url: str, reason: str) -> None:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    with pytest.raises(ImageError, match=reason):
        await reader.read([message])


async def test_part_without_a_image_is_refused(reader: ImageReader) -> None:
    with pytest.raises(ImageError, match="no URL"):
        await reader.read([{"role": "user", "content": [{"type": "image"}]}])
