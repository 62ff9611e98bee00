"""Which bytes of the published weights this rank holds.

FSDP2 shards parameters on dim 0, so a rank's part of a tensor is one contiguous byte range of it: no gather is needed.
"""

from dataclasses import dataclass
from typing import cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.errors import TrainerError
from trainer.weights.adapter import adapter_tensor_name
from transport.wire.sample import DType
from transport.wire.weights import TensorEntry


@dataclass(frozen=True)
class LocalRange:
    """`data` are the bytes of tensor `name` that start at byte `offset` of it."""

    name: str
    offset: int
    data: memoryview


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, detached but not copied; tied ones once, under their first name.

    Of a model with an adapter only the adapter, named as in `trainer.weights.adapter`: the rest is as it was loaded.
    """
    weights: dict[str, Tensor] = {}
    adapter: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            weights[name] = value.detach()
            if (adapter_name := adapter_tensor_name(name)) is not None:
                adapter[adapter_name] = value.detach()
    return adapter or weights


def spec_of(name: str, tensor: Tensor) -> TensorEntry:
    """Name, type and global shape; no shard and no hash yet."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in get_args(DType):
        raise TrainerError(f"weight {name} has type {dtype}, which cannot be published")
    return TensorEntry(name=name, dtype=cast(DType, dtype), shape=tuple(tensor.shape), shard="", hash="")


def local_range(name: str, tensor: Tensor, *, is_first: bool) -> LocalRange | None:
    """The bytes that this rank must write, or `None` if others write them all."""
    if not isinstance(tensor, DTensor):
        return LocalRange(name, 0, raw_bytes(tensor)) if is_first else None
    if not _is_writer(tensor):
        return None
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    rows = tensor.to_local()
    if rows.numel() == 0:
        return None
    row_bytes = rows[0].numel() * rows.element_size() if rows.dim() else rows.element_size()
    assert tuple(rows.shape) == tuple(shape), f"{name}: local shard {tuple(rows.shape)}, layout says {shape}"
    return LocalRange(name, (offsets[0] if offsets else 0) * row_bytes, raw_bytes(rows))


def raw_bytes(tensor: Tensor) -> memoryview:
    """Little-endian bytes of a tensor; copies only what is on a device or not contiguous."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _is_writer(tensor: DTensor) -> bool:
    """Of replicas, the first writes; a shard of another dim than 0 is not one byte range."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    for place, placement in zip(coordinate, tensor.placements, strict=True):
        if isinstance(placement, Replicate):
            if place != 0:
                return False
        elif not (isinstance(placement, Shard) and placement.dim == 0):
            raise TrainerError(f"cannot publish a tensor with placement {placement}: only shards of dim 0")
    return True
