"""`CheckpointManifest`: the last file of a checkpoint, and the proof that all others are whole.

A folder without it is a save that never ended. Sizes and hashes of all files are in it, so that a checkpoint is
verified before anything of it is loaded.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
import xxhash
from loguru import logger

from runtime.errors import UserError
from trainer.errors import CheckpointInvalid
from trainer.ranks import Ranks

MANIFEST_NAME = "manifest.json"
FORMAT = 3
"""1 had a pickled index of tensors, 2 an index of our own; from 3 on the tensors are in safetensors files."""
_CHUNK_BYTES = 8 << 20


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


NEWEST_NAME = "newest.json"
_FOLDER = re.compile(r"step-(\d{8,})")


def find_newest(root: Path, run_id: str | None, ranks: Ranks) -> CheckpointManifest | None:
    """The newest valid checkpoint of `run_id` (`None`: of any run), verified by all ranks together; `None` if the run
    never completed one. Raises `UserError` if it has completed some and none is valid."""
    reasons = []
    for folder in _newest_first(root, ranks):
        manifest, reason = _verify(folder, run_id, ranks)
        if manifest is not None:
            return manifest
        reasons.append(f"{folder.name}: {reason}")
        if ranks.is_first:
            logger.warning(f"skipping checkpoint {folder.name}: {reason}")
    if ranks.any((root / NEWEST_NAME).exists()):
        found = "; ".join(reasons) or "all folders are gone"
        raise UserError(
            f"no valid checkpoint in {root} ({found}), but the run had one: restore a checkpoint, or move {root} away "
            "and use another --run.name to start from step 0"
        )
    return None


def _newest_first(root: Path, ranks: Ranks) -> list[Path]:
    """Folders as the first rank sees them, so that all ranks look at the same ones."""
    names = sorted(path.name for path in root.glob("step-*") if _FOLDER.fullmatch(path.name))
    listed = ranks.gather("\n".join(reversed(names)).encode())[0].decode()
    return [root / name for name in listed.split("\n") if name]


def _verify(folder: Path, run_id: str | None, ranks: Ranks) -> tuple[CheckpointManifest | None, str]:
    """The manifest, or the reason why the checkpoint is not valid. Each rank verifies its share of the files."""

    def verify_share() -> tuple[CheckpointManifest | None, str]:
        try:
            manifest = read_manifest(folder)
            if run_id not in (None, manifest.run_id):
                raise CheckpointInvalid(f"belongs to run {manifest.run_id!r}")
            verify_files(folder, manifest.files[ranks.rank :: ranks.world_size])
        except CheckpointInvalid as error:
            return None, str(error)
        return manifest, ""

    manifest, reason = ranks.wait_together(verify_share)  # files are of different size, and disks of different speed
    reasons = [text.decode() for text in ranks.gather(reason.encode()) if text]
    return (None, "; ".join(dict.fromkeys(reasons))) if reasons else (manifest, "")
