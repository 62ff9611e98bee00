"""Images in messages: read once, shared, and refused with a reason.

Our patches are those of Hugging Face's PIL processor, to the last bit.
"""

import asyncio
import gc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from chat.errors import ImageError
from chat.images.patches import PatchMaker, PatchSettings
from chat.images.reader import ImageReader, read_image_reader
from chat.tokenizer import Tokenizer
from runtime.errors import UserError
from tests.chat.drawn import data_url, draw, user, vision_folder, vision_tokenizer

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


SIZES = [(16, 16), (8, 8), (5, 3), (97, 33), (200, 150), (640, 480), (13, 301)]

PROCESSORS = {
    "tiny": {"patch_size": 4, "temporal_patch_size": 1, "size": {"shortest_edge": 64, "longest_edge": 4096}},
    "qwen2.5": {},
    "qwen3": {
        "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    },
    "raw": {"do_normalize": False, "rescale_factor": 0.01},
    "pixels": {"min_pixels": 100 * 28 * 28, "max_pixels": 200 * 28 * 28},
}


@pytest.mark.parametrize("name", PROCESSORS)
async def test_patches_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = Qwen2VLImageProcessorPil(**PROCESSORS[name])  # type: ignore[arg-type]
    theirs.save_pretrained(vision_folder(tmp_path))
    reader = read_image_reader(tmp_path, vision_tokenizer())
    assert reader is not None
    for seed, (width, height) in enumerate(SIZES):
        image = draw(seed, width, height)
        expected = theirs(images=[image], return_tensors="np")
        (ours,) = (await reader.read([user(data_url(image))])).images.values()
        assert ours.image_grid_thw.numpy().tolist() == expected["image_grid_thw"].tolist()
        assert ours.pixel_values.numpy().tobytes() == expected["pixel_values"].tobytes()


@pytest.mark.parametrize("mode", ["L", "RGBA", "LA"])
def test_images_of_other_modes_become_rgb_as_in_transformers(mode: str) -> None:
    image = draw(1, 30, 20, mode)
    expected = Qwen2VLImageProcessorPil()(images=[image], return_tensors="np")["pixel_values"]
    assert PatchMaker(PatchSettings()).cut(image).patches.tobytes() == expected.tobytes()


def test_lossy_formats_are_read(tmp_path: Path) -> None:
    image = draw(2, 64, 48)
    for form in ("JPEG", "WEBP"):
        path = tmp_path / f"image.{form}"
        image.save(path, format=form)
        expected = Qwen2VLImageProcessorPil()(images=[Image.open(path)], return_tensors="np")["pixel_values"]
        assert np.array_equal(PatchMaker(PatchSettings()).cut(Image.open(path)).patches, expected)


def test_image_that_is_far_too_long_is_refused() -> None:
    with pytest.raises(ImageError, match="200 times"):
        PatchMaker(PatchSettings()).cut(Image.new("RGB", (500, 2)))


def test_unknown_image_processor_is_refused_at_start_up(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path, image_processor_type="SiglipImageProcessor")
    with pytest.raises(UserError, match="SiglipImageProcessor"):
        read_image_reader(folder, vision_tokenizer())


def test_model_of_text_has_no_reader(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path)
    (folder / "config.json").write_text("{}")
    assert read_image_reader(folder, vision_tokenizer()) is None
