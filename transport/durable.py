"""Files that exist whole or not at all, through any kill -9 or power cut: the one definition of a durable write."""

import os
import secrets
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transport.wire.sample import Buffer  # numpy: small commands write files, too

TEMPORARY_SUFFIX = ".tmp"


def write_durably(
    path: Path,
    chunks: "Iterable[Buffer]",
    *,
    several_writers: bool = False,
    mode: int | None = None,
    overwrite: bool = True,
) -> None:
    """Write `chunks` to `path`: temporary file, fsync, rename, fsync of the folder.

    A reader, or a crash at any instant, sees the old file or the new one, never a part. After an error `path` is what
    it was before and no temporary file is left.

    One writer per path: the temporary file is `path` + `TEMPORARY_SUFFIX`, so that `remove_temporaries` finds what a
    killed writer left. With `several_writers` its name is unique (and starts with a dot): none spoils the file of
    another, the last to finish wins. `mode` is set before the name appears; by default the umask decides. Without
    `overwrite` the first to finish wins, and the others get `FileExistsError`.
    """
    name = f".{path.name}.{secrets.token_hex(8)}" if several_writers else path.name + TEMPORARY_SUFFIX
    temporary = path.with_name(name)
    make = partial(os.open, mode=0o666 if mode is None else 0o600)
    try:
        with open(temporary, "xb" if several_writers else "wb", opener=make) as file:
            file.writelines(chunks)
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        if overwrite:
            temporary.replace(path)
        else:
            path.hardlink_to(temporary)  # unlike a rename, fails if another was first
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def atomic_write(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """`write_durably` for a small file that several processes may write, readable by all. Raises `OSError`."""
    write_durably(path, [data], several_writers=True, mode=mode)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable: a rename or removal alone may be lost in a power cut."""
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
