"""Files that exist whole or not at all, through any kill -9 or power cut."""

import os
from collections.abc import Iterable
from pathlib import Path

from transport.wire.tensor import Buffer

TEMPORARY_SUFFIX = ".tmp"


def write_durably(path: Path, chunks: Iterable[Buffer]) -> None:
    """Write `chunks` to `path`: temporary name, fsync, rename, fsync of the folder. One writer per path.

    After an `OSError` (disk full, say) `path` is what it was before and nothing is left under the temporary name.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames and removals in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporaries(directory: Path) -> list[Path]:
    """Delete what a killed writer left under temporary names; returns what was deleted."""
    leftovers = sorted(directory.glob("*" + TEMPORARY_SUFFIX))
    for path in leftovers:
        path.unlink(missing_ok=True)
    return leftovers
