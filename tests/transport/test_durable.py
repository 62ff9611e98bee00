import os
import resource
from pathlib import Path

import pytest

from transport.durable import remove_temporaries, sync_directory, write_durably


def test_chunks_are_written_in_order(tmp_path: Path) -> None:
    write_durably(tmp_path / "file", [b"one", memoryview(b"two"), bytearray(b"three")])
    assert (tmp_path / "file").read_bytes() == b"onetwothree"


def test_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, [b"a long first version"])
    held = path.open("rb")
    write_durably(path, [b"short"])
    assert path.read_bytes() == b"short"
    assert held.read() == b"a long first version"
    held.close()


def test_error_in_the_middle_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, [b"old"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_durably(path, [bytes(60_000), bytes(60_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_durably(tmp_path / "nowhere" / "file", [b"x"])
    with pytest.raises(FileNotFoundError):
        sync_directory(tmp_path / "nowhere")


def test_several_writers_never_touch_the_temporary_file_of_one(tmp_path: Path) -> None:
    (tmp_path / "file.tmp").write_bytes(b"half")
    write_durably(tmp_path / "file", [b"whole"], several_writers=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"whole", "file.tmp": b"half"}


def test_without_overwriting_the_first_writer_wins(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, [b"first"], overwrite=False)
    with pytest.raises(FileExistsError):
        write_durably(path, [b"second"], overwrite=False)
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]


def test_the_umask_decides_unless_a_mode_is_given(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_durably(tmp_path / "default", [b""])
        write_durably(tmp_path / "open", [b""], mode=0o644)
        write_durably(tmp_path / "secret", [b""], mode=0o600)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"default": 0o640, "open": 0o644, "secret": 0o600}


def test_only_temporaries_are_removed(tmp_path: Path) -> None:
    (tmp_path / "a.batch.tmp").write_bytes(b"")
    (tmp_path / "b.batch").write_bytes(b"")
    assert remove_temporaries(tmp_path) == [tmp_path / "a.batch.tmp"]
    assert os.listdir(tmp_path) == ["b.batch"]
