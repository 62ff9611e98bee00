"""Follows a metrics file that another process appends to."""

import json
from collections.abc import Mapping
from pathlib import Path

Row = Mapping[str, float | None]
"""One line: `step`, `time`, and the values by key."""


class MetricTail:
    """Each `read` returns the whole lines that were appended since the last one. The file may appear later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Row]:
        """New rows, oldest first. A line without its end is left for the next time; garbage is skipped."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows: list[Row] = []
        for line in whole.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows
