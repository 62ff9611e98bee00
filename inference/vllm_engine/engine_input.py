"""A job's prompt as vLLM's engine takes it: tokens, and the patches of the pictures among them.

Pictures come cut into patches and their placeholders expanded, so vLLM's own image processor is passed by. It must not
rescale and normalise them once more on the device either (`--no-mm-device-do-normalize`, see `command.py`).
"""

import torch
import xxhash
from vllm.inputs import MultiModalInput, TokensInput, mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange

from inference.generation import Job
from inference.images import Images

MODALITY = "image"


def engine_input(job: Job) -> TokensInput | MultiModalInput:
    """What `EngineClient.generate` takes for `job`, which was checked."""
    tokens = job.prompt.tolist()
    if job.images is None:
        return tokens_input(tokens)
    items = _items(job.images)
    return mm_input(tokens, {MODALITY: items}, {MODALITY: _hashes(job.images)}, {MODALITY: _placeholders(job.images)})


def _items(images: Images) -> list[MultiModalKwargsItem]:
    """One per picture, with the names that the model's forward takes."""
    grids = torch.tensor(images.grids)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes(MODALITY, grids.prod(dim=1)),
        "image_grid_thw": MultiModalFieldConfig.batched(MODALITY, keep_on_cpu=True),  # positions are computed there
    }
    values = {"pixel_values": torch.tensor(images.pixel_values), "image_grid_thw": grids}
    items: list[MultiModalKwargsItem] = MultiModalKwargsItems.from_hf_inputs(values, fields)[MODALITY]
    return items


def _hashes(images: Images) -> list[str]:
    """By which vLLM knows a picture again, in its caches of prefixes and of what the vision tower made."""
    hashes = []
    for grid, patches in zip(images.grids, images.patches, strict=True):
        digest = xxhash.xxh3_128(grid.data)
        digest.update(patches.data)
        hashes.append(digest.hexdigest())
    return hashes


def _placeholders(images: Images) -> list[PlaceholderRange]:
    return [PlaceholderRange(offset=start, length=end - start) for start, end in images.runs]
