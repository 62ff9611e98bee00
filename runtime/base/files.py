"""Files that services share: secrets for their owner, a model's own config."""

import contextlib
import json
import secrets
import stat
from pathlib import Path

from runtime.errors import UserError
from transport.durable import write_durably

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
    secret = secrets.token_urlsafe(32).encode()
    with contextlib.suppress(FileExistsError):  # another service was first
        write_durably(path, [secret], several_writers=True, mode=0o600, overwrite=False)


def sees_images(folder: Path) -> bool:
    """Whether the model in `folder` has a vision tower."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # loading the model reports what is wrong with it
        return False
    return isinstance(config, dict) and "vision_config" in config
