"""Published files: which rank writes what (torch's fake process group), their layout, whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from runtime.errors import StorageError
from tests.trainer.tiny import ALONE, TiedModel, file_size_limit
from trainer.errors import TrainerError
from trainer.weights import files as publish
from trainer.weights.files import FilePublisher
from trainer.weights.local_ranges import LocalRange, local_range, named_weights, raw_bytes, spec_of
from trainer.weights.safetensors_layout import plan_shards
from transport.backoff import Backoff
from transport.errors import WeightsError
from transport.wire.weights import TensorEntry, hash_bytes, read_weight_manifest, version_dir, weights_digest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    return folder


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(3)
    return TiedModel()


def expected_digest(weights: dict[str, torch.Tensor]) -> str:
    """From the tensors alone, as an engine computes it."""
    return weights_digest(
        (name, str(value.dtype).removeprefix("torch."), tuple(value.shape), hash_bytes(value.numpy().tobytes()))
        for name, value in weights.items()
    )


def test_a_publish_is_what_the_safetensors_library_would_write(root, model, tmp_path):
    published = FilePublisher(root, "run", 3, ALONE).publish(model, 7)
    save_file(named_weights(model), tmp_path / "reference.safetensors", metadata={"format": "pt"})
    folder = Path(published.location).parent
    assert folder == version_dir(root, 7)
    assert (folder / "model-00001-of-00001.safetensors").read_bytes() == (
        tmp_path / "reference.safetensors"
    ).read_bytes()


def test_tied_weights_are_published_once_under_their_first_name(root, model):
    published = FilePublisher(root, "run", 3, ALONE).publish(model, 0)
    names = [entry.name for entry in read_weight_manifest(Path(published.location)).tensors]
    assert sorted(names) == ["first.bias", "first.weight", "scale", "second.bias"]


def test_the_digest_is_that_of_the_tensors_and_hashes_are_those_of_the_bytes(root, model):
    published = FilePublisher(root, "run", 3, ALONE).publish(model, 1)
    manifest = read_weight_manifest(Path(published.location))
    assert manifest.digest == published.digest == expected_digest(named_weights(model))
    assert (manifest.run_id, manifest.version) == ("run", 1)
    for shard in manifest.shards:
        content = (Path(published.location).parent / shard.file).read_bytes()
        assert len(content) == shard.num_bytes


def test_a_model_in_several_files_has_the_same_digest(root, model):
    whole = FilePublisher(root, "run", 3, ALONE).publish(model, 1)
    split = FilePublisher(root, "run", 3, ALONE, max_shard_bytes=100).publish(model, 2)
    files = sorted(Path(split.location).parent.glob("*.safetensors"))
    assert len(files) == len(read_weight_manifest(Path(split.location)).shards) > 1
    assert split.digest == whole.digest
    loaded = {name: value for file in files for name, value in load_file(file).items()}
    assert all(torch.equal(loaded[name], value) for name, value in named_weights(model).items())


def test_the_newest_versions_stay_and_a_later_one_of_before_a_crash_is_left_alone(root, model):
    publisher = FilePublisher(root, "run", 2, ALONE)
    publisher.publish(model, 9)
    for version in range(5):
        publisher.publish(model, version)
    assert sorted(path.name for path in root.iterdir()) == ["v00000003", "v00000004", "v00000009"]


def test_publishing_a_version_again_replaces_it(root, model):
    publisher = FilePublisher(root, "run", 2, ALONE)
    first = publisher.publish(model, 1)
    with torch.no_grad():
        model.first.weight.add_(1.0)
    second = publisher.publish(model, 1)
    assert second.digest != first.digest
    assert read_weight_manifest(Path(second.location)).digest == second.digest
    assert [path.name for path in root.iterdir()] == ["v00000001"]


def test_leftovers_of_a_killed_publish_are_cleaned_up_and_never_look_like_a_version(root, model):
    leftover = root / ".v00000001.tmp"
    leftover.mkdir()
    (leftover / "model-00001-of-00001.safetensors").write_bytes(b"torn")
    with pytest.raises(WeightsError, match="incomplete"):
        read_weight_manifest(version_dir(root, 1) / "manifest.json")
    FilePublisher(root, "run", 2, ALONE).publish(model, 2)
    assert [path.name for path in root.iterdir()] == ["v00000002"]


def test_a_full_disk_leaves_the_old_version_and_ends_with_a_storage_error(root, monkeypatch):
    monkeypatch.setattr(publish, "BACKOFF", Backoff(0.0, 0.0))
    publisher = FilePublisher(root, "run", 2, ALONE)
    model = nn.Linear(200, 200)
    before = publisher.publish(model, 1)
    with file_size_limit(100_000), pytest.raises(StorageError, match=r"rank 0: .*File too large"):
        publisher.publish(model, 2)
    assert read_weight_manifest(Path(before.location)).digest == before.digest
    assert [path.name for path in root.iterdir()] == ["v00000001"], "no leftover takes room"
    assert publisher.publish(model, 2).digest == before.digest


def assemble(tensors: dict[str, torch.Tensor]) -> bytes:
    """The file that the layout describes, written tensor by tensor."""
    (shard,) = plan_shards(spec_of(name, tensor) for name, tensor in tensors.items())
    content = bytearray(shard.num_bytes)
    content[: len(shard.head)] = shard.head
    for name, start in shard.starts.items():
        data = raw_bytes(tensors[name])
        content[start : start + len(data)] = data
    return bytes(content)


def test_layout_is_that_of_the_safetensors_library_byte_for_byte():
    tensors = {
        "b.weight": torch.randn(5, 3),
        "a": torch.randn(7).to(torch.bfloat16),
        "z": torch.arange(4),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "mask": torch.tensor([True, False]),
        "ä": torch.ones(2),
    }
    assert assemble(tensors) == safetensors.torch.save(tensors, metadata={"format": "pt"})


def test_a_file_is_full_before_the_next_begins_and_all_tensors_have_a_place():
    specs = [spec_of(f"w{index}", torch.zeros(25)) for index in range(5)]
    shards = plan_shards(specs, max_bytes=200)
    assert [list(shard.starts) for shard in shards] == [["w0", "w1"], ["w2", "w3"], ["w4"]]
    assert [shard.file for shard in shards] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def test_a_tensor_above_the_limit_has_a_file_of_its_own():
    specs = [spec_of(name, torch.zeros(size)) for name, size in {"a": 1, "b": 100, "c": 1}.items()]
    assert [list(shard.starts) for shard in plan_shards(specs, max_bytes=8)] == [["a"], ["b"], ["c"]]


def test_layout_does_not_depend_on_the_order_of_the_tensors():
    specs = [spec_of(name, torch.zeros(2, 2)) for name in "cab"]
    assert plan_shards(specs) == plan_shards(reversed(specs))


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
