"""Reading a publish, checking it against the model, copying it in, and the digest of what the model really holds.

Everything that can fail happens in `read_publish` and `check_fits`, before the first byte of the model changes.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from inference.errors import WeightsRefused
from transport.errors import WeightsError
from transport.wire.weights import (
    AdapterInfo,
    ShardEntry,
    TensorEntry,
    WeightManifest,
    hash_bytes,
    read_weight_manifest,
    weights_digest,
)


@dataclass(frozen=True, slots=True)
class VerifiedWeights:
    """A whole publish in memory, every hash checked."""

    version: int
    digest: str
    tensors: dict[str, Tensor]
    adapter: AdapterInfo | None = None
    """Given: the tensors are an adapter, and no model has them before it is merged (`AdapterBase`)."""
    merged_digest: str | None = None
    """Given: an adapter was merged into the tensors. Their own digest; `digest` stays that of the publish."""


def read_publish(
    manifest_path: Path, *, version: int, run_id: str, given_up: threading.Event | None = None
) -> VerifiedWeights:
    """Read and verify all of a publish. Raises `WeightsRefused` with the reason, soon after `given_up` is set."""
    try:
        manifest = read_weight_manifest(manifest_path)
        _check_identity(manifest, version, run_id)
        tensors: dict[str, Tensor] = {}
        for shard in manifest.shards:
            if given_up is not None and given_up.is_set():  # else each try that timed out would fill the memory
                raise WeightsError("it was given up: its caller does not wait any more")
            tensors |= _read_shard(manifest_path.parent, shard)
        _check_tensors(manifest, tensors)
    except (WeightsError, OSError) as error:
        raise WeightsRefused(f"version {version} is not loaded: {error}") from error
    return VerifiedWeights(version, manifest.digest, tensors, manifest.adapter)


def check_fits(model: PreTrainedModel, weights: VerifiedWeights) -> None:
    """Raise `WeightsRefused` unless names, shapes and dtypes are exactly those of the model."""
    ours = dict(served_tensors(model))
    missing, foreign = ours.keys() - weights.tensors.keys(), weights.tensors.keys() - ours.keys()
    if missing or foreign:
        raise WeightsRefused(
            f"version {weights.version} is of another model: missing {_some(missing)}, unexpected {_some(foreign)}"
        )
    for name, tensor in weights.tensors.items():
        if (tensor.shape, tensor.dtype) != (ours[name].shape, ours[name].dtype):
            raise WeightsRefused(
                f"version {weights.version} is of another model: {name} is {tensor.dtype}{list(tensor.shape)}, "
                f"the engine has {ours[name].dtype}{list(ours[name].shape)}"
            )


def copy_into(model: PreTrainedModel, weights: VerifiedWeights) -> None:
    """Overwrite the model's tensors in place. `check_fits` must have passed."""
    with torch.no_grad():
        for name, tensor in served_tensors(model):
            tensor.copy_(weights.tensors[name])


def served_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The model's own tensors under the names of its safetensors files: tied ones once, under their first name."""
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape)
        if place not in seen:
            seen.add(place)
            yield name, tensor


def model_digest(model: PreTrainedModel) -> str:
    """`weights_digest` of the bytes that the model computes with."""
    return tensors_digest(served_tensors(model))


def tensors_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """`weights_digest` of tensors in memory."""
    return weights_digest(
        (name, dtype_name(tensor), tuple(tensor.shape), tensor_hash(tensor)) for name, tensor in tensors
    )


def tensor_hash(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hash_bytes(flat.view(torch.uint8).numpy().data)


def dtype_name(tensor: Tensor) -> str:
    """`float32`, `bfloat16`, ... as manifests spell it."""
    return str(tensor.dtype).removeprefix("torch.")


def _check_identity(manifest: WeightManifest, version: int, run_id: str) -> None:
    if manifest.version != version:
        raise WeightsError(f"the manifest is of version {manifest.version}")
    if manifest.run_id != run_id:
        raise WeightsError(f"the manifest is of run {manifest.run_id!r}, this engine belongs to {run_id!r}")


def _read_shard(folder: Path, shard: ShardEntry) -> dict[str, Tensor]:
    if Path(shard.file).name != shard.file:
        raise WeightsError(f"shard {shard.file!r} is not a file name")
    data = (folder / shard.file).read_bytes()
    if len(data) != shard.num_bytes:
        raise WeightsError(f"shard {shard.file} has {len(data)} bytes, the manifest says {shard.num_bytes}")
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise WeightsError(f"shard {shard.file} is not a safetensors file: {error}") from error


def _check_tensors(manifest: WeightManifest, tensors: dict[str, Tensor]) -> None:
    entries = {entry.name: entry for entry in manifest.tensors}
    if len(entries) != len(manifest.tensors) or entries.keys() != tensors.keys():
        differing = {entry.name for entry in manifest.tensors} ^ tensors.keys()
        raise WeightsError(f"manifest and shards hold different tensors: {_some(differing)}")
    for name, tensor in tensors.items():
        _check_tensor(entries[name], tensor)


def _check_tensor(entry: TensorEntry, tensor: Tensor) -> None:
    if (dtype_name(tensor), tuple(tensor.shape)) != (entry.dtype, entry.shape):
        raise WeightsError(
            f"{entry.name} is {dtype_name(tensor)}{list(tensor.shape)}, "
            f"the manifest says {entry.dtype}{list(entry.shape)}"
        )
    if tensor_hash(tensor) != entry.hash:
        raise WeightsError(f"{entry.name} of {entry.shard} is corrupt: its hash differs from the manifest's")


def _some(names: "set[str]") -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "none"
