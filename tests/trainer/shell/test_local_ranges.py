"""Which rank writes what, for layouts larger than a test machine: the process group is torch's fake one."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.errors import TrainerError
from trainer.weights.local_ranges import LocalRange, local_range, named_weights, raw_bytes, spec_of
from transport.wire.weights import TensorEntry


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard_of(tensor: torch.Tensor, mesh_shape: tuple[int, ...]) -> DTensor:
    """What this rank holds of `tensor` under FSDP (1D mesh) or HSDP (2D mesh)."""
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)]
    size, place = mesh_shape[-1], mesh.get_coordinate()[-1]
    chunks = list(torch.chunk(tensor, size)) if tensor.shape[0] else []
    local = chunks[place] if place < len(chunks) else tensor[:0]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def ranges_of_all(tensor: torch.Tensor, mesh_shape: tuple[int, ...]) -> list[LocalRange]:
    world_size = torch.Size(mesh_shape).numel()
    found = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            found.append(local_range("w", shard_of(tensor, mesh_shape), is_first=rank == 0))
    return [part for part in found if part is not None]


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,), (2, 2), (3, 2)])
@pytest.mark.parametrize("shape", [(8, 3), (5, 3), (1, 3), (2,), (7, 2, 2)])
def test_the_ranges_of_all_ranks_are_the_tensor_each_byte_once(shape, mesh_shape):
    tensor = torch.randn(shape)
    content = bytearray(tensor.numel() * 4)
    written = 0
    for part in ranges_of_all(tensor, mesh_shape):
        content[part.offset : part.offset + len(part.data)] = part.data
        written += len(part.data)
    assert written == len(content)
    assert bytes(content) == tensor.numpy().tobytes()


@pytest.mark.parametrize(("is_first", "writes"), [(True, True), (False, False)])
def test_a_plain_tensor_is_written_by_the_first_rank(is_first, writes):
    assert (local_range("w", torch.ones(3), is_first=is_first) is not None) == writes


def test_a_shard_of_another_dimension_is_refused():
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        columns = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(1)], run_check=False)
        with pytest.raises(TrainerError, match="only shards of dim 0"):
            local_range("w", columns, is_first=True)


def test_raw_bytes_of_any_layout_and_type():
    strided = torch.arange(6.0).reshape(2, 3).T
    assert bytes(raw_bytes(strided)) == strided.contiguous().numpy().tobytes()
    assert bytes(raw_bytes(torch.tensor([1.0], dtype=torch.bfloat16))) == b"\x80\x3f"
    assert bytes(raw_bytes(torch.tensor(1, dtype=torch.int64))) == (1).to_bytes(8, "little")


def test_spec_is_the_global_shape():
    with as_rank(1, 2):
        assert spec_of("w", shard_of(torch.ones(5, 2), (2,))) == TensorEntry(
            name="w", dtype="float32", shape=(5, 2), shard="", hash=""
        )


def test_a_type_without_a_wire_form_is_refused():
    with pytest.raises(TrainerError, match="weight w has type complex64"):
        spec_of("w", torch.ones(1, dtype=torch.complex64))


def test_weights_are_the_live_tensors():
    model = torch.nn.Linear(2, 2)
    weights = named_weights(model)
    with torch.no_grad():
        model.weight.fill_(7.0)
    assert weights["weight"].eq(7.0).all()
    assert not weights["weight"].requires_grad
