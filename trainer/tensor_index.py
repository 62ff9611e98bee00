"""The index of a checkpoint's tensors, as JSON: DCP would pickle it, and reading a pickle runs whatever it says.

`IndexWriter` and `IndexReader` take the place of DCP's file system writer and reader. The tensors themselves are in the
format of `torch.save`, which DCP reads with `weights_only=True`: tensors and nothing else.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from runtime.atomic_write import atomic_write
from trainer.errors import CheckpointInvalid

INDEX_NAME = ".metadata"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}


class ChunkEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A box of a tensor, and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    """A name in the checkpoint's folder."""
    start: int
    num_bytes: int


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor."""

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[ChunkEntry, ...]


TensorIndex = dict[str, TensorEntry]


class IndexWriter(FileSystemWriter):
    """DCP's writer with our index."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self._folder = folder

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, durably; called on the coordinator once all ranks have written."""
        written = (result for results_of_rank in results for result in results_of_rank)
        atomic_write(self._folder / INDEX_NAME, msgspec.json.encode(index_of(metadata, written)))


class IndexReader(FileSystemReader):
    """DCP's reader with our index."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """The index, in DCP's terms. Raises `CheckpointInvalid`."""
        try:
            index = msgspec.json.decode((self._folder / INDEX_NAME).read_bytes(), type=TensorIndex)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointInvalid(f"{INDEX_NAME} cannot be read: {error}") from error
        return metadata_of(index)


def index_of(metadata: Metadata, written: Iterable[WriteResult]) -> TensorIndex:
    """What the ranks wrote where."""
    places = {(result.index.fqn, tuple(result.index.offset or ())): result.storage_data for result in written}
    index: TensorIndex = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), f"{name} is not a tensor"
        chunks = tuple(_chunk_entry(chunk, places[name, tuple(chunk.offsets)]) for chunk in tensor.chunks)
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        index[name] = TensorEntry(dtype=dtype, size=tuple(tensor.size), chunks=chunks)
    return index


def metadata_of(index: TensorIndex) -> Metadata:
    """DCP's view of an index. Raises `CheckpointInvalid` for one that no save of ours has written."""
    places: dict[MetadataIndex, _StorageInfo] = {}
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, entry in index.items():
        if entry.dtype not in DTYPES or not all(_is_plain_name(chunk.file) for chunk in entry.chunks):
            raise CheckpointInvalid(f"{INDEX_NAME} describes {name} as {entry.dtype} in {entry.chunks}")
        chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
        tensors[name] = TensorStorageMetadata(
            TensorProperties(dtype=DTYPES[entry.dtype]), torch.Size(entry.size), chunks
        )
        for number, chunk in enumerate(entry.chunks):
            place = _StorageInfo(chunk.file, chunk.start, chunk.num_bytes)
            places[MetadataIndex(name, chunk.offsets, number)] = place
    return Metadata(
        state_dict_metadata=tensors,
        planner_data={name: (name,) for name in tensors},
        storage_data=places,
        storage_meta=StorageMeta(),
    )


def _is_plain_name(file: str) -> bool:
    return Path(file).name == file and file not in ("", "..")


def _chunk_entry(chunk: ChunkStorageMetadata, place: _StorageInfo) -> ChunkEntry:
    return ChunkEntry(
        offsets=tuple(chunk.offsets),
        sizes=tuple(chunk.sizes),
        file=place.relative_path,
        start=place.offset,
        num_bytes=place.length,
    )
