"""The index of a checkpoint: JSON in, JSON out, and nothing in it can run code or leave the folder."""

import pickle
from pathlib import Path

import msgspec
import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from runtime.errors import StorageError
from trainer.checkpoint_state import load_weights
from trainer.errors import CheckpointInvalid
from trainer.tensor_index import INDEX_NAME, ChunkEntry, IndexReader, IndexWriter, TensorEntry, TensorIndex

TENSORS = {
    "model.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "model.half": torch.ones(5, dtype=torch.bfloat16),
    "optimizer.step": torch.tensor(7.0),
    "rng.0.cpu": torch.arange(10, dtype=torch.uint8),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with pytest.warns(UserWarning, match="single process"):
        state_dict_saver.save(dict(TENSORS), storage_writer=IndexWriter(tmp_path), no_dist=True)
    return tmp_path


def read_index(folder: Path) -> TensorIndex:
    return msgspec.json.decode((folder / INDEX_NAME).read_bytes(), type=TensorIndex)


def write_index(folder: Path, **changes: object) -> None:
    """Change the chunk of `model.weight`."""
    index = read_index(folder)
    (chunk,) = index["model.weight"].chunks
    chunk_changes = {key: value for key, value in changes.items() if key in ChunkEntry.__struct_fields__}
    entry_changes = {key: value for key, value in changes.items() if key not in chunk_changes}
    entry = msgspec.structs.replace(
        index["model.weight"], chunks=(msgspec.structs.replace(chunk, **chunk_changes),), **entry_changes
    )
    (folder / INDEX_NAME).write_bytes(msgspec.json.encode(index | {"model.weight": entry}))


def test_what_was_saved_is_loaded(saved: Path) -> None:
    loaded = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    with pytest.warns(UserWarning, match="single process"):
        state_dict_loader.load(loaded, storage_reader=IndexReader(saved), no_dist=True)
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded[name], tensor), name


def test_index_names_every_tensor_and_its_bytes(saved: Path) -> None:
    index = read_index(saved)
    assert {name: (entry.dtype, entry.size) for name, entry in index.items()} == {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in TENSORS.items()
    }
    ends = {chunk.start + chunk.num_bytes for entry in index.values() for chunk in entry.chunks}
    assert max(ends) <= (saved / "__0_0.distcp").stat().st_size


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._path,)


def test_a_pickle_in_its_place_is_refused_and_not_run(saved: Path, tmp_path: Path) -> None:
    (saved / INDEX_NAME).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(CheckpointInvalid, match="cannot be read"):
        IndexReader(saved).read_metadata()
    assert not (tmp_path / "ran").exists()


def test_a_pickle_in_the_place_of_a_tensor_is_refused_and_not_run(saved: Path, tmp_path: Path) -> None:
    torch.save(Payload(tmp_path / "ran"), saved / "payload.distcp")
    write_index(saved, file="payload.distcp", start=0, num_bytes=(saved / "payload.distcp").stat().st_size)
    loaded = {"model.weight": torch.zeros(3, 4)}
    with pytest.warns(UserWarning, match="single process"), pytest.raises(CheckpointException) as refused:
        state_dict_loader.load(loaded, storage_reader=IndexReader(saved), no_dist=True)
    assert "Weights only load failed" in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_unsound_tensors_are_an_error_that_names_the_cause(saved: Path) -> None:
    (saved / "__0_0.distcp").write_bytes(bytes((saved / "__0_0.distcp").stat().st_size))
    with pytest.raises(StorageError, match="rank 0"):
        load_weights(saved)


@pytest.mark.parametrize("file", ["../elsewhere", "/etc/passwd", "a/b", "", ".", ".."])
def test_files_outside_the_folder_are_refused(saved: Path, file: str) -> None:
    write_index(saved, file=file)
    with pytest.raises(CheckpointInvalid, match=r"model\.weight"):
        IndexReader(saved).read_metadata()


@pytest.mark.parametrize("dtype", ["load", "object", "__class__", ""])
def test_types_that_are_none_are_refused(saved: Path, dtype: str) -> None:
    write_index(saved, dtype=dtype)
    with pytest.raises(CheckpointInvalid, match=r"model\.weight"):
        IndexReader(saved).read_metadata()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 1}', b'{"a": {"dtype": "x"}}', b"\xff"])
def test_broken_index_is_refused(saved: Path, content: bytes) -> None:
    (saved / INDEX_NAME).write_bytes(content)
    with pytest.raises(CheckpointInvalid, match="cannot be read"):
        IndexReader(saved).read_metadata()


def test_missing_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="cannot be read"):
        IndexReader(tmp_path).read_metadata()


def test_entries_are_strict() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"dtype": "float32", "size": [1], "chunks": [], "x": 1}', type=TensorEntry)
