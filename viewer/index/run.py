"""`Run`: one run directory, ready to be asked. Everything here reads; nothing writes into the run."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import tokenizers

from runtime.metrics.progress import MetricRow, MetricTail
from runtime.run_dir.run_dir import RunDir
from viewer.errors import NotRecorded, ViewerError
from viewer.index.records import LineSpan, read_span
from viewer.index.run_index import Row, RunIndex, rollout_path, token_path

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
        """Read what the run has written since the last call; free if that was a moment ago."""
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
        self.index.close()

    def _decode(self, path: Path, row: Row) -> Json:
        span = LineSpan(int(row["offset"] or 0), int(row["size"] or 0))
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


CONTEXT = 4
"""Tokens before a token that decide how it is written."""
PART_OF_CHARACTER = "⋯"
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TokenText:
    """Decodes with `core`; without one, a token is shown as its id.

    A token's text is what it adds to its neighbours before it: decoders drop or insert spaces at the start of a
    text, and a character may need several tokens. Such a character is shown at its last token; the ones before show
    `⋯`.
    """

    def __init__(self, core: tokenizers.Tokenizer | None) -> None:
        self._core = core

    @classmethod
    def of_run(cls, run_dir: RunDir) -> "TokenText":
        """The tokenizer of the model that the run's configs name, if it still lies there."""
        for folder in _model_folders(run_dir):
            try:
                return cls(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
            except Exception:  # the library raises bare Exception; without a tokenizer the ids are shown
                continue
        return cls(None)

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """One text per token; together they are the text of the sequence."""
        if self._core is None:
            return [f"⟨{token_id}⟩" for token_id in token_ids]
        texts = []
        start = 0  # of the character that is not finished yet
        for place in range(len(token_ids)):
            before = self._decode(token_ids[max(0, start - CONTEXT) : start])
            text = self._decode(token_ids[max(0, start - CONTEXT) : place + 1])
            added = text[len(before) :] if text.startswith(before) else self._decode(token_ids[start : place + 1])
            if added.endswith(UNFINISHED) and place + 1 < len(token_ids) and place - start < CONTEXT:
                texts.append(PART_OF_CHARACTER)
                continue
            texts.append(added)
            start = place + 1
        return texts

    def _decode(self, token_ids: Sequence[int]) -> str:
        assert self._core is not None
        text: str = self._core.decode(list(token_ids), skip_special_tokens=False)
        return text


def _model_folders(run_dir: RunDir) -> list[Path]:
    """`model.path` of the configs, as it is, and below the folders that the run lies in."""
    folders = []
    for name in ("rl", "trainer", "orchestrator", "inference"):
        try:
            model = json.loads((run_dir.config / f"{name}.json").read_bytes())["model"]["path"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        folders += [Path(model), *(parent / str(model) for parent in run_dir.path.resolve().parents)]
    return list(dict.fromkeys(folders))
