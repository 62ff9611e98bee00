"""Files that exist whole or not at all, through any kill -9 or power cut."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from transport.tensor import Buffer

TEMPORARY_SUFFIX = ".tmp"


def write_durably(path: Path, chunks: Iterable[Buffer], at_least_bytes: int = 0) -> None:
    """Write `chunks` to `path`: temporary name, fsync, rename, fsync of the folder. One writer per path.

    The first `at_least_bytes` of them are given room beforehand, if the file system can; less must not come.
    After an `OSError` (disk full, say) `path` is what it was before and nothing is left under the temporary name.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            _reserve(file.fileno(), at_least_bytes)
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Saves ext4 a reservation for each block of a large file, a fifth of the time it takes to write it."""
    if num_bytes:
        with contextlib.suppress(OSError):  # a full disk, or one that cannot do this: writing will tell
            os.posix_fallocate(descriptor, 0, num_bytes)


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
