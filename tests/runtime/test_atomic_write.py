"""`atomic_write`: whole or absent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.base.files import atomic_write

# Writes ever longer files under one name until it is killed.
WRITER = """
import sys
from pathlib import Path
from runtime.base.files import atomic_write
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
