"""The safetensors files that vLLM loads at start: which tensors a publish must have, and the digest of version 0.

Tensors have the names of the model in memory, as in a publish. Those in the files of some vision models are older.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.conversion_mapping import get_model_conversion_mapping

from inference.weights.publish import dtype_name, tensor_hash
from runtime.base.files import sees_images
from runtime.errors import UserError
from transport.wire.weights import weights_digest

_TIED_HEAD = "lm_head.weight"


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor, by name. A tied head that is stored all the same is left out. Raises `UserError`."""
    rename = _renaming(folder)
    return {rename(name): tuple(file.get_slice(name).get_shape()) for name, file in _entries(folder)}  # type: ignore[no-untyped-call]


def checkpoint_digest(folder: Path, dtype: torch.dtype) -> str:
    """`weights_digest` of the tensors as an engine of `dtype` loads them; one at a time in memory."""
    rename = _renaming(folder)
    return weights_digest(
        (rename(name), dtype_name(tensor), tuple(tensor.shape), tensor_hash(tensor))
        for name, file in _entries(folder)
        for tensor in (_cast(file.get_tensor(name), dtype),)  # type: ignore[no-untyped-call]
    )


def _renaming(folder: Path) -> Callable[[str], str]:
    """What transformers does with the names of tensors when it loads this model."""
    if not sees_images(folder):
        return lambda name: name
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    steps = get_model_conversion_mapping(model)

    def rename(name: str) -> str:
        for step in steps:
            name, _ = step.rename_source_key(name)
        return name

    return rename


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _entries(folder: Path) -> "Iterator[tuple[str, safe_open]]":
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"no *.safetensors in {folder}: --engine vllm needs weights in that format")
    skipped = {_TIED_HEAD} if _is_tied(folder) else set()
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is not a dict
                    if name not in skipped:
                        yield name, file
        except SafetensorError as error:
            raise UserError(f"{path} is not a safetensors file: {error}") from error


def _is_tied(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text())
    return bool(config.get("tie_word_embeddings", False))
