"""From a model folder to its `ImageReader`, if the model sees pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from orchestrator.images.patches import PatchMaker, PatchSettings
from orchestrator.images.placeholders import Placeholders
from orchestrator.images.reader import ImageReader
from orchestrator.json_file import read_json_object
from runtime.errors import UserError

PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")


def read_image_reader(folder: Path, core: tokenizers.Tokenizer) -> ImageReader | None:
    """The reader of the model in `folder`; `None` for a model of text. Raises `UserError` for a vision model whose
    pictures we cannot process exactly."""
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
