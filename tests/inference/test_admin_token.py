"""The admin token lives in a file that only its owner can read."""

from pathlib import Path

import pytest

from inference.admin_token import read_admin_token
from runtime.errors import UserError


def test_missing_file_is_made_for_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "admin.token"
    token = read_admin_token(path)
    assert len(token) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_admin_token(path) == token


def test_white_space_around_the_token_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("secret\n")
    assert read_admin_token(path) == "secret"


def test_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        read_admin_token(path)


def test_empty_file_and_folder_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    with pytest.raises(UserError, match="is empty"):
        read_admin_token(path)
    with pytest.raises(UserError, match="cannot read"):
        read_admin_token(tmp_path)
