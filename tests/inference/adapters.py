"""Adapters and their publishes, made on the spot."""

import copy
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from inference.weights.publish import dtype_name, model_digest, tensor_hash
from tests.support.models import write_manifest
from transport.wire.weights import AdapterInfo, ShardEntry, TensorEntry, WeightManifest, publish_digest, version_dir

RANK, ALPHA = 4, 6
TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")


def make_adapter(model: PreTrainedModel, seed: int, targets: tuple[str, ...] = TARGETS) -> dict[str, Tensor]:
    """Random pairs for the targets of `model`, large enough to matter."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            rows, columns = parameter.shape
            tensors[f"{module}.lora_A.weight"] = 0.2 * torch.randn(RANK, columns, generator=random)
            tensors[f"{module}.lora_B.weight"] = 0.2 * torch.randn(rows, RANK, generator=random)
    return tensors


def with_adapter(base: PreTrainedModel, adapter: dict[str, Tensor]) -> PreTrainedModel:
    """`base` with an adapter: the reference."""
    model = copy.deepcopy(base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = name.removesuffix(".weight")
            if f"{module}.lora_A.weight" in adapter:
                parameter += ALPHA / RANK * adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
    return model


def publish_adapter(
    root: Path, base: PreTrainedModel, adapter: dict[str, Tensor], version: int, *, run_id: str = "default"
) -> Path:
    """Write an adapter of `base` as policy `version` the way a trainer does; returns the path of the manifest."""
    folder = version_dir(root, version)
    folder.mkdir(parents=True)
    file = "model-00001-of-00001.safetensors"
    save_file(adapter, folder / file)
    data = (folder / file).read_bytes()
    info = AdapterInfo(rank=RANK, alpha=ALPHA, base_digest=model_digest(base))
    entries = tuple(
        TensorEntry(name=name, dtype=dtype_name(t), shape=tuple(t.shape), shard=file, hash=tensor_hash(t))  # type: ignore[arg-type]
        for name, t in adapter.items()
    )
    manifest = WeightManifest(
        run_id=run_id,
        version=version,
        tensors=entries,
        shards=(ShardEntry(file=file, num_bytes=len(data)),),
        digest=publish_digest(entries, info),
        adapter=info,
    )
    return write_manifest(folder, manifest)
