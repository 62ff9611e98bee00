"""`CheckpointManifest`: the last file of a checkpoint, and the proof that all others are whole.

A folder without it is a save that never ended. Sizes and hashes of all files are in it, so that a checkpoint is
verified before anything of it is loaded.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import xxhash

from trainer.errors import CheckpointInvalid

MANIFEST_NAME = "manifest.json"
FORMAT = 3
"""1 had a pickled index of tensors, 2 an index of our own; from 3 on the tensors are in safetensors files."""
_CHUNK_BYTES = 8 << 20


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of the checkpoint."""

    path: str
    """Relative to the checkpoint's folder."""
    num_bytes: int
    hash: str
    """xxh3_128 of its content."""


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The head of a checkpoint: state after batch `step`."""

    format: int
    run_id: str
    step: int
    world_size: int
    """Ranks that wrote it; any number can load it."""
    config_digest: str
    files: tuple[FileEntry, ...]


def checkpoint_dir(root: Path, step: int) -> Path:
    """Folder of the checkpoint after batch `step`."""
    return root / f"step-{step:08d}"


def describe_file(folder: Path, path: Path) -> FileEntry:
    """Size and hash of a file of the checkpoint. Raises `OSError`."""
    state = xxhash.xxh3_128()
    num_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            state.update(chunk)
            num_bytes += len(chunk)
    return FileEntry(path=path.relative_to(folder).as_posix(), num_bytes=num_bytes, hash=state.hexdigest())


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a checkpoint. Raises `CheckpointInvalid`."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=CheckpointManifest)
    except FileNotFoundError:
        raise CheckpointInvalid(f"no {MANIFEST_NAME}: the save did not end") from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointInvalid(f"{MANIFEST_NAME} cannot be read: {error}") from error
    if manifest.format != FORMAT:
        raise CheckpointInvalid(
            f"has format {manifest.format}, and this version reads {FORMAT}: go on with the version that wrote it, or "
            "export the model with that version and start another --run.name from it"
        )
    if folder.name != checkpoint_dir(folder.parent, manifest.step).name:
        raise CheckpointInvalid(f"its manifest is that of step {manifest.step}")
    return manifest


def verify_files(folder: Path, entries: Iterable[FileEntry]) -> None:
    """Raise `CheckpointInvalid`, naming the file, unless all files are what the manifest says."""
    for entry in entries:
        path = folder / entry.path
        try:
            if path.stat().st_size != entry.num_bytes:
                raise CheckpointInvalid(f"{entry.path} has {path.stat().st_size} bytes, not {entry.num_bytes}")
            if describe_file(folder, path) != entry:
                raise CheckpointInvalid(f"{entry.path} does not have the hash that the manifest promises")
        except OSError as error:
            raise CheckpointInvalid(f"{entry.path} cannot be read: {error.strerror}") from error
