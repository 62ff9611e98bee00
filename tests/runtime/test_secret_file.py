"""Secrets live in files that only their owner can read."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.base.files import read_or_make_secret
from runtime.errors import UserError


def test_missing_file_is_made_for_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "admin.token"
    token = read_or_make_secret(path)
    assert len(token) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_or_make_secret(path) == token


def test_white_space_around_the_token_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("secret\n")
    assert read_or_make_secret(path) == "secret"


def test_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        read_or_make_secret(path)


def test_empty_file_and_folder_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    with pytest.raises(UserError, match="is empty"):
        read_or_make_secret(path)
    with pytest.raises(UserError, match="cannot read"):
        read_or_make_secret(tmp_path)


def test_services_that_start_together_share_one_secret(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "admin.token"
    with ThreadPoolExecutor(16) as pool:
        made = set(pool.map(lambda _: read_or_make_secret(path), range(16)))
    assert len(made) == 1
    assert [file.name for file in path.parent.iterdir()] == ["admin.token"]
