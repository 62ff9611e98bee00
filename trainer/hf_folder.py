"""The small files of a Hugging Face model folder: everything but the weights."""

from pathlib import Path

from runtime.base.files import atomic_write

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"}
_INDEX = ".index.json"
_MAX_BYTES = 64 << 20
"""Larger files are no config and no tokenizer."""


def copy_model_files(source: Path, target: Path) -> None:
    """Copy config, tokenizer, chat template and the like, durably, so that the model can be exported from `target`."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not _is_weights(path) and path.stat().st_size <= _MAX_BYTES:
            atomic_write(target / path.name, path.read_bytes())


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHTS or path.name.endswith(_INDEX) or path.name.startswith(".")
