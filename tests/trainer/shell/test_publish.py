from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from runtime.errors import StorageError
from tests.trainer.shell.tiny import ALONE, TiedModel, file_size_limit
from trainer.weights import files as publish
from trainer.weights.files import FilePublisher
from trainer.weights.local_ranges import named_weights
from transport.errors import WeightsError
from transport.wire.weights import hash_bytes, read_weight_manifest, version_dir, weights_digest


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
    folder = Path(published.manifest_path).parent
    assert folder == version_dir(root, 7)
    assert (folder / "model-00001-of-00001.safetensors").read_bytes() == (
        tmp_path / "reference.safetensors"
    ).read_bytes()


def test_tied_weights_are_published_once_under_their_first_name(root, model):
    published = FilePublisher(root, "run", 3, ALONE).publish(model, 0)
    names = [entry.name for entry in read_weight_manifest(Path(published.manifest_path)).tensors]
    assert sorted(names) == ["first.bias", "first.weight", "scale", "second.bias"]


def test_the_digest_is_that_of_the_tensors_and_hashes_are_those_of_the_bytes(root, model):
    published = FilePublisher(root, "run", 3, ALONE).publish(model, 1)
    manifest = read_weight_manifest(Path(published.manifest_path))
    assert manifest.digest == published.digest == expected_digest(named_weights(model))
    assert (manifest.run_id, manifest.version) == ("run", 1)
    for shard in manifest.shards:
        content = (Path(published.manifest_path).parent / shard.file).read_bytes()
        assert len(content) == shard.num_bytes


def test_a_model_in_several_files_has_the_same_digest(root, model):
    whole = FilePublisher(root, "run", 3, ALONE).publish(model, 1)
    split = FilePublisher(root, "run", 3, ALONE, max_shard_bytes=100).publish(model, 2)
    files = sorted(Path(split.manifest_path).parent.glob("*.safetensors"))
    assert len(files) == len(read_weight_manifest(Path(split.manifest_path)).shards) > 1
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
    assert read_weight_manifest(Path(second.manifest_path)).digest == second.digest
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
    monkeypatch.setattr(publish, "RETRY_PAUSE_S", 0.0)
    publisher = FilePublisher(root, "run", 2, ALONE)
    model = nn.Linear(200, 200)
    before = publisher.publish(model, 1)
    with file_size_limit(100_000), pytest.raises(StorageError, match=r"rank 0: .*File too large"):
        publisher.publish(model, 2)
    assert read_weight_manifest(Path(before.manifest_path)).digest == before.digest
    assert [path.name for path in root.iterdir()] == ["v00000001"], "no leftover takes room"
    assert publisher.publish(model, 2).digest == before.digest
