"""Secrets that services share: files that only their owner can read."""

import os
import secrets
import stat
from pathlib import Path

from runtime.atomic_write import sync_directory
from runtime.errors import UserError

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
