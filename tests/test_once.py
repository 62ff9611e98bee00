"""What one of those who ask has made, the others find."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.once import Once


def make(folder: Path) -> None:
    """Fails if it was made before."""
    (folder / "made").touch(exist_ok=False)


def fail(folder: Path) -> None:
    make(folder)
    raise ZeroDivisionError


def test_of_many_who_ask_at_once_one_makes_it(tmp_path: Path) -> None:
    """The lock belongs to the opened file: it keeps threads apart as it does processes."""
    asked: list[Path] = []

    def note_and_make(folder: Path) -> None:
        asked.append(folder)
        make(folder)

    def ask(make_it: Callable[[Path], None]) -> Path:
        return Once(tmp_path)("thing", make_it)

    with ThreadPoolExecutor(8) as threads:
        folders = set(threads.map(ask, [note_and_make] * 32))
    assert folders == {tmp_path / "thing"}
    assert len(asked) == 1
    assert (tmp_path / "thing" / "made").exists()


def test_what_a_failed_attempt_left_is_thrown_away(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        Once(tmp_path)("thing", fail)
    assert (Once(tmp_path)("thing", make) / "made").exists()
    Once(tmp_path)("thing", fail)  # is there already: nobody makes it
