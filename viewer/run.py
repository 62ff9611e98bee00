"""`Run`: one run directory, ready to be asked. Everything here reads; nothing writes into the run."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from runtime.metric_tail import MetricTail
from runtime.metric_tail import Row as MetricRow
from runtime.run_dir import RunDir
from viewer.errors import NotRecorded, ViewerError
from viewer.json_lines import Span, read_span
from viewer.run_index import Row, RunIndex, rollout_path, token_path
from viewer.token_text import TokenText

Json = dict[str, object]
REFRESH_S = 1.0
"""Seconds for which what was read counts as new."""
SERVICES = ("orchestrator", "trainer", "inference")


class Run:
    """Usage: `run = Run(path, cache_folder()); run.refresh(); run.index.select(...)`. Raises `ViewerError`."""

    def __init__(self, path: Path, cache: Path | None) -> None:
        self.dir = RunDir(path)
        if not (self.dir.metrics.is_dir() or self.dir.rollouts.is_dir()):
            raise ViewerError(f"{path} is not a run directory: it has neither `metrics` nor `rollouts`")
        self.name = path.resolve().name
        self.index = RunIndex(self.dir, cache)
        self.text = TokenText.of_run(self.dir)
        self._tails = {name: MetricTail(self.dir.metrics / f"{name}.jsonl") for name in SERVICES}
        self._rows: dict[str, list[MetricRow]] = {name: [] for name in SERVICES}
        self._refreshed_at = float("-inf")
        self._lock = threading.Lock()

    @property
    def metrics(self) -> Mapping[str, list[MetricRow]]:
        """All metric rows so far, by service."""
        return self._rows

    def refresh(self) -> None:
        """Take in what the run has written since; free if that was a moment ago."""
        with self._lock:
            if time.monotonic() - self._refreshed_at < REFRESH_S:
                return
            self.index.refresh()
            for name, tail in self._tails.items():
                self._rows[name] += tail.read()
            self._refreshed_at = time.monotonic()

    def rollout_line(self, step: int, line: int) -> Json:
        """The whole record of a rollout. Raises `NotRecorded`."""
        found = self.index.select("SELECT offset, size FROM rollouts WHERE step = ? AND line = ?", (step, line))
        return self._decode(rollout_path(self.dir, step), _only(found, f"rollout {step}.{line}"))

    def token_line(self, step: int, rank: int, line: int) -> Json:
        """The whole record of an exported sequence. Raises `NotRecorded`."""
        query = "SELECT offset, size FROM tokens WHERE step = ? AND rank = ? AND line = ?"
        found = self.index.select(query, (step, rank, line))
        return self._decode(token_path(self.dir, step, rank), _only(found, f"sequence {step}.{rank}.{line}"))

    def close(self) -> None:
        """Release the index."""
        self.index.close()

    def _decode(self, path: Path, row: Row) -> Json:
        span = Span(int(row["offset"] or 0), int(row["size"] or 0))
        try:
            record = msgspec.json.decode(read_span(path, span))
        except (msgspec.MsgspecError, RecursionError) as error:  # replaced since it was indexed
            raise NotRecorded(f"{path} has changed; load the page again") from error
        if not isinstance(record, dict):
            raise NotRecorded(f"{path} holds something else than records")
        return record


def _only(rows: list[Row], what: str) -> Row:
    if not rows:
        raise NotRecorded(f"{what} is not recorded in this run")
    return rows[0]
