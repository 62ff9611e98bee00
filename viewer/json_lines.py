"""Files of JSON lines, read by byte offset, so that one line out of gigabytes costs one seek."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from viewer.errors import NotRecorded


@dataclass(frozen=True, slots=True)
class Span:
    """Where a line lies in its file."""

    offset: int
    size: int


def read_spans(path: Path) -> Iterator[tuple[Span, bytes]]:
    """Every line with its place, its newline cut off. A last line without a newline counts, too."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            yield Span(offset, len(line)), line.rstrip(b"\n")
            offset += len(line)


def read_span(path: Path, span: Span) -> bytes:
    """One line. Raises `NotRecorded` if the file is gone."""
    try:
        with path.open("rb") as file:
            file.seek(span.offset)
            return file.read(span.size)
    except OSError as error:
        raise NotRecorded(f"{path} cannot be read any more: {error.strerror}") from error
