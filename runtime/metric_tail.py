"""Follows a metrics file that another process appends to."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

Row = Mapping[str, float | None]
"""One line: `step`, `time`, and the values by key."""
_rows: msgspec.json.Decoder[dict[str, int | float | None]] = msgspec.json.Decoder(dict[str, int | float | None])


class MetricTail:
    """Each `read` returns the whole lines that were appended since the last one. The file may appear later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Row]:
        """New rows, oldest first. A line without its end is left for the next time; one that is no row is skipped."""
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
                rows.append(_rows.decode(line))
            except msgspec.MsgspecError:
                continue
        return rows
