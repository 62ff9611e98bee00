"""A log file with a bounded size that never takes its process down."""

import sys
from pathlib import Path


class LogFile:
    """Appends text to `path`; at `max_bytes` it becomes `<path>.1`, older ones move up, `keep` of them stay.

    A disk that refuses is reported once on stderr; later lines are dropped until writing works again.
    """

    def __init__(self, path: Path, *, max_bytes: int = 64 << 20, keep: int = 3) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._warned = False

    def write(self, text: str) -> None:
        """Append `text`. Opened anew each time: rotation by other tools and deleted run directories do no harm."""
        try:
            with self._path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(text)
                size = file.tell()
            if size >= self._max_bytes:
                self._rotate()
        except OSError as error:
            if not self._warned:
                self._warned = True
                sys.stderr.write(f"cannot write {self._path}: {error.strerror}; logging to stderr only\n")

    def _rotate(self) -> None:
        for number in range(self._keep - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.replace(self._numbered(number + 1))
        self._path.replace(self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
