"""The secret that guards the admin routes."""

import stat
from pathlib import Path

from runtime.errors import UserError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_admin_token(path: Path) -> str:
    """The token in `path`. Raises `UserError` if it is missing, empty, or readable by others."""
    try:
        mode, token = path.stat().st_mode, path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --admin-token-file {path}: {error}") from error
    if mode & _OTHERS:
        raise UserError(f"--admin-token-file {path} can be read by others: chmod 600 {path}")
    if not token:
        raise UserError(f"--admin-token-file {path} is empty")
    return token
