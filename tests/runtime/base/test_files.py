"""Files are written whole or not at all; secrets are for their owner only."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.base.files import read_or_make_secret
from runtime.errors import UserError
from transport.durable import atomic_write

# Writes ever longer files under one name until it is killed.
WRITER = """
import sys
from pathlib import Path
from transport.durable import atomic_write
path, size = Path(sys.argv[1]), 1
while True:
    atomic_write(path, bytes([size % 251]) * (size * 1000))
    print(size, flush=True)
    size += 1
"""


def test_content_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")
    atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_mode_is_set_before_the_name_appears(tmp_path: Path) -> None:
    atomic_write(tmp_path / "token", b"secret", mode=0o600)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_failure_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    target = tmp_path / "taken"
    target.mkdir()
    (target / "inside").write_text("x")
    with pytest.raises(OSError, match="directory"):
        atomic_write(target, b"new")
    assert os.listdir(tmp_path) == ["taken"]


def test_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        atomic_write(tmp_path / "no" / "file", b"x")


@pytest.mark.parametrize("after", [1, 7, 23])
def test_killed_writer_leaves_a_whole_file(tmp_path: Path, after: int) -> None:
    path = tmp_path / "file"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    with writer.stdout as lines:
        for _ in range(after):
            lines.readline()
        writer.kill()
    writer.wait()
    content = path.read_bytes()
    size = len(content) // 1000
    assert size >= after
    assert content == bytes([size % 251]) * (size * 1000)


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
