"""The secret that guards the admin routes."""

import secrets
import stat
from pathlib import Path

from runtime.atomic_write import atomic_write
from runtime.errors import UserError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_admin_token(path: Path) -> str:
    """The token in `path`; a file that does not exist is made, with a new token, for the owner only.

    Raises `UserError` if it cannot be read or made, is empty, or can be read by others.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            atomic_write(path, secrets.token_urlsafe(32).encode(), mode=0o600)
        mode, token = path.stat().st_mode, path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --admin-token-file {path}: {error}") from error
    if mode & _OTHERS:
        raise UserError(f"--admin-token-file {path} can be read by others: chmod 600 {path}")
    if not token:
        raise UserError(f"--admin-token-file {path} is empty")
    return token
