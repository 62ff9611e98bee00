"""Lines of saved rollouts and exported sequences: read by byte offset, decoded as far as the index needs.

The full lines are described in docs/environments.md (rollouts) and docs/observing.md. Fields that an older run did not
write have defaults.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from viewer.errors import NotRecorded


@dataclass(frozen=True, slots=True)
class LineSpan:
    """Where a line lies in its file."""

    offset: int
    size: int


def read_spans(path: Path) -> Iterator[tuple[LineSpan, bytes]]:
    """Every line with its place, its newline cut off. A last line without a newline counts, too."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            yield LineSpan(offset, len(line)), line.rstrip(b"\n")
            offset += len(line)


def read_span(path: Path, span: LineSpan) -> bytes:
    """One line. Raises `NotRecorded` if the file is gone."""
    try:
        with path.open("rb") as file:
            file.seek(span.offset)
            return file.read(span.size)
    except OSError as error:
        raise NotRecorded(f"{path} cannot be read any more: {error.strerror}") from error


T = TypeVar("T")
Column = list[float | bool | None]


class RolloutHead(msgspec.Struct, frozen=True, gc=False):
    """One line of `rollouts/step-*.jsonl`, without what was said."""

    env_name: str
    example_id: str
    group_id: str
    trajectory_id: str
    state: str
    advantage: float | None = None
    reward: float | None = None
    failure: str | None = None
    num_tokens: int = 0
    num_sampled_tokens: int = 0
    oldest_version: int | None = None
    newest_version: int | None = None


class TokenHead(msgspec.Struct, frozen=True, gc=False):
    """One line of `token_export/step-*/rank-*.jsonl`, with the columns that filters need."""

    row: int
    env_name: str
    group_id: str
    trajectory_id: str
    loss_mask: list[bool]
    reward: list[float]
    advantage: list[float | None]
    ratio: Column
    mismatch_kl: Column
    entropy: Column
    is_masked: Column
    step_index: int = 0
    rank: int = 0
    micro_batch: int = 0
    position: int = 0
    micro_batch_tokens: int = 0


_rollouts: msgspec.json.Decoder[RolloutHead] = msgspec.json.Decoder(RolloutHead)
_tokens: msgspec.json.Decoder[TokenHead] = msgspec.json.Decoder(TokenHead)


def rollout_heads(path: Path) -> Iterator[tuple[int, LineSpan, RolloutHead]]:
    """(line number, place, head) of every line that is one; others are skipped."""
    yield from _heads(path, _rollouts)


def token_heads(path: Path) -> Iterator[tuple[int, LineSpan, TokenHead]]:
    """(line number, place, head) of every line that is one; others are skipped."""
    yield from _heads(path, _tokens)


def _heads(path: Path, decoder: "msgspec.json.Decoder[T]") -> Iterator[tuple[int, LineSpan, T]]:
    for number, (span, line) in enumerate(read_spans(path)):
        try:
            yield number, span, decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError):
            continue


def extreme(column: Column, *, largest: bool) -> float | None:
    """The largest or smallest number of a column; `None` if there is none."""
    numbers = [float(value) for value in column if value is not None]
    if not numbers:
        return None
    return max(numbers) if largest else min(numbers)


def first(column: Sequence[float | None], mask: list[bool]) -> float | None:
    """The value of the first trained token: advantages of a sequence are usually all alike."""
    return next((value for value, trained in zip(column, mask, strict=False) if trained), None)
