"""Files that services share: written whole or not at all, secrets for their owner, a model's own config."""

import json
import os
import secrets
import stat
import tempfile
from pathlib import Path

from runtime.errors import UserError


def atomic_write(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `data`, durably: after return the new content survives a power cut.

    A reader, or a crash at any instant, sees the old file or the new one, never a part. The temporary file lies beside
    `path` (its name starts with a dot) and is removed when writing fails. Raises `OSError`.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in `path` durable: a rename alone may be lost in a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_or_make_secret(path: Path, key: str = "admin_token_file") -> str:
    """The secret in `path`; a file that does not exist is made, with a new one, for the owner only.

    Services that start together agree: the first to make the file wins, the others read it. Raises `UserError`,
    naming the config `key`, if the file cannot be read or made, is empty, or can be read by others.
    """
    try:
        if not path.exists():
            _make(path)
        mode, secret = path.stat().st_mode, path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {key} = {path}: {error}") from error
    if mode & _OTHERS:
        raise UserError(f"{key} = {path} can be read by others: chmod 600 {path}")
    if not secret:
        raise UserError(f"{key} = {path} is empty")
    return secret


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(32))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # unlike a rename, fails if another service was first
        except FileExistsError:
            return
    finally:
        temporary.unlink()
    sync_directory(path.parent)


def sees_images(folder: Path) -> bool:
    """Whether the model in `folder` has a vision tower."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # loading the model reports what is wrong with it
        return False
    return isinstance(config, dict) and "vision_config" in config
