"""Our patches are those of Hugging Face's PIL processor, to the last bit."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from chat.errors import ImageError
from chat.images.patches import PatchMaker, PatchSettings
from chat.images.reader import read_image_reader
from runtime.errors import UserError
from tests.chat.images.drawn import data_url, draw, user, vision_folder, vision_tokenizer

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
