"""`RunIndex`: byte offsets and sortable numbers of everything a run recorded, in one SQLite file.

The files of a run appear by rename and are replaced as a whole, so size and modification time tell whether one must be
read again; only new ones cost time. The index lies in the user's cache folder, never in the run directory: a run may
be read-only, or another user's. It can be deleted at any time.
"""

import hashlib
import os
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from runtime.run_dir.run_dir import RunDir
from viewer.index.records import LineSpan, RolloutHead, TokenHead, extreme, first, rollout_heads, token_heads

Value = str | int | float | None
Row = dict[str, Value]


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tandem" / "viewer"


class RunIndex:
    """Safe to use from several threads: one connection behind a lock. `folder` of `None` keeps it in memory."""

    def __init__(self, run_dir: RunDir, folder: Path | None) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._connection = _open(_index_path(run_dir, folder))
        self._connection.row_factory = _as_dict

    def refresh(self) -> int:
        """Index files that are new or changed; forget those that are gone. Returns how many were read."""
        with self._lock, self._connection:
            rows = self._connection.execute("SELECT * FROM files").fetchall()
            known = {str(row["path"]): (row["size"], row["mtime_ns"]) for row in rows}
            found = {str(path): path for path in _files(self._run_dir)}
            for gone in known.keys() - found.keys():
                self._forget(gone)
            num_read = 0
            for name, path in found.items():
                stat = _stat(path)
                if stat is not None and known.get(name) != stat:
                    self._forget(name)
                    self._read(path)
                    self._connection.execute("INSERT INTO files VALUES (?, ?, ?)", (name, *stat))
                    num_read += 1
            return num_read

    def select(self, query: str, values: Sequence[Value] = ()) -> list[Row]:
        """Rows of a query. `query` is ours; whatever came from outside goes into `values`."""
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def close(self) -> None:
        self._connection.close()

    def _forget(self, name: str) -> None:
        path = Path(name)
        step = step_of(path)
        if path.parent.name == "rollouts":
            self._connection.execute("DELETE FROM rollouts WHERE step = ?", (step,))
            self._connection.execute("DELETE FROM groups WHERE step = ?", (step,))
        else:
            self._connection.execute("DELETE FROM tokens WHERE step = ? AND rank = ?", (step, rank_of(path)))
        self._connection.execute("DELETE FROM files WHERE path = ?", (name,))

    def _read(self, path: Path) -> None:
        step = step_of(path)
        if path.parent.name == "rollouts":
            rows = (_rollout_row(step, line, span, head) for line, span, head in rollout_heads(path))
            self._insert("rollouts", 16, rows)
            self._connection.execute(GROUPS_OF_STEP, (step,))
        else:
            rank = rank_of(path)
            rows = (_token_row(step, rank, line, span, head) for line, span, head in token_heads(path))
            self._insert("tokens", 22, rows)

    def _insert(self, table: str, num_columns: int, rows: Iterator[tuple[Value, ...]]) -> None:
        marks = ", ".join("?" * num_columns)
        self._connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)


def step_of(path: Path) -> int:
    """12 for `step-00000012.jsonl` and for `step-00000012/rank-00000.jsonl`."""
    found = re.search(r"step-(\d+)", path.name) or re.search(r"step-(\d+)", path.parent.name)
    return int(found[1]) if found else -1


def rank_of(path: Path) -> int:
    """3 for `rank-00003.jsonl`."""
    found = re.search(r"rank-(\d+)", path.name)
    return int(found[1]) if found else -1


def rollout_path(run_dir: RunDir, step: int) -> Path:
    """The file that holds the rollouts of batch `step`."""
    return run_dir.rollouts / f"step-{step:08d}.jsonl"


def token_path(run_dir: RunDir, step: int, rank: int) -> Path:
    """The file that holds the sequences of `step` that `rank` exported."""
    return run_dir.token_export / f"step-{step:08d}" / f"rank-{rank:05d}.jsonl"


def _files(run_dir: RunDir) -> Iterator[Path]:
    yield from sorted(run_dir.rollouts.glob("step-*.jsonl"))
    yield from sorted(run_dir.token_export.glob("step-*/rank-*.jsonl"))


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:  # removed while we looked
        return None
    return stat.st_size, stat.st_mtime_ns


def _index_path(run_dir: RunDir, folder: Path | None) -> str:
    if folder is None:
        return ":memory:"
    name = hashlib.sha256(str(run_dir.path.resolve()).encode()).hexdigest()[:24]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:  # no home, a full or a read-only disk: slower, not impossible
        return ":memory:"
    return str(folder / f"{name}.sqlite") if os.access(folder, os.W_OK) else ":memory:"


def _open(path: str) -> sqlite3.Connection:
    """The index in `path`, empty if it was of another version, damaged, or not there."""
    for attempt in (_connect, _connect_anew):
        try:
            return attempt(path)
        except sqlite3.DatabaseError:
            continue
    return _connect(":memory:")


def _connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
    try:
        # It can be built again at any time: a crash may cost it, so nothing waits for the disk.
        connection.execute("PRAGMA synchronous = OFF")
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found != INDEX_VERSION:
            if found:
                raise sqlite3.DatabaseError(f"index of version {found}")
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {INDEX_VERSION}; COMMIT;")
    except sqlite3.DatabaseError:
        connection.close()
        raise
    return connection


def _connect_anew(path: str) -> sqlite3.Connection:
    if path != ":memory:":
        Path(path).unlink(missing_ok=True)
    return _connect(path)


def _as_dict(cursor: sqlite3.Cursor, row: tuple[Value, ...]) -> Row:
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


def _rollout_row(step: int, line: int, span: LineSpan, head: RolloutHead) -> tuple[Value, ...]:
    return (
        step,
        line,
        span.offset,
        span.size,
        head.env_name,
        head.example_id,
        head.group_id,
        head.trajectory_id,
        head.state,
        head.advantage,
        head.reward,
        head.failure,
        head.num_tokens,
        head.num_sampled_tokens,
        head.oldest_version,
        head.newest_version,
    )


def _token_row(step: int, rank: int, line: int, span: LineSpan, head: TokenHead) -> tuple[Value, ...]:
    return (
        step,
        rank,
        line,
        span.offset,
        span.size,
        head.row,
        head.env_name,
        head.group_id,
        head.trajectory_id,
        head.step_index,
        head.micro_batch,
        head.position,
        head.micro_batch_tokens,
        len(head.loss_mask),
        sum(head.loss_mask),
        sum(bool(value) for value in head.is_masked),
        head.reward[0] if head.reward else None,
        first(head.advantage, head.loss_mask),
        extreme(head.ratio, largest=True),
        extreme(head.ratio, largest=False),
        extreme(head.mismatch_kl, largest=True),
        extreme(head.entropy, largest=True),
    )


INDEX_VERSION = 1
"""A file of another version is thrown away and built again: it holds nothing of its own."""

SCHEMA = """
CREATE TABLE files (path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER) WITHOUT ROWID;
CREATE TABLE rollouts (
    step INTEGER, line INTEGER, offset INTEGER, size INTEGER, env_name TEXT, example_id TEXT, group_id TEXT,
    trajectory_id TEXT, state TEXT, advantage REAL, reward REAL, failure TEXT, num_tokens INTEGER,
    num_sampled_tokens INTEGER, oldest_version INTEGER, newest_version INTEGER, PRIMARY KEY (step, line)
) WITHOUT ROWID;
CREATE INDEX rollouts_by_group ON rollouts (group_id);
CREATE INDEX rollouts_by_trajectory ON rollouts (trajectory_id);
CREATE TABLE groups (
    group_id TEXT, step INTEGER, env_name TEXT, example_id TEXT, state TEXT, num_rollouts INTEGER, num_failed INTEGER,
    reward_mean REAL, reward_min REAL, reward_max REAL, spread REAL, num_tokens INTEGER, PRIMARY KEY (step, group_id)
) WITHOUT ROWID;
CREATE INDEX groups_by_id ON groups (group_id);
CREATE INDEX groups_by_spread ON groups (spread DESC, step DESC);
CREATE INDEX groups_by_reward ON groups (reward_mean);
CREATE INDEX groups_by_example ON groups (env_name, example_id);
CREATE TABLE tokens (
    step INTEGER, rank INTEGER, line INTEGER, offset INTEGER, size INTEGER, row INTEGER, env_name TEXT, group_id TEXT,
    trajectory_id TEXT, step_index INTEGER, micro_batch INTEGER, position INTEGER, micro_batch_tokens INTEGER,
    num_tokens INTEGER, num_loss_tokens INTEGER, num_masked INTEGER, reward REAL, advantage REAL, max_ratio REAL,
    min_ratio REAL, max_kl REAL, max_entropy REAL, PRIMARY KEY (step, rank, line)
) WITHOUT ROWID;
CREATE INDEX tokens_by_trajectory ON tokens (trajectory_id);
CREATE INDEX tokens_by_group ON tokens (group_id);
CREATE INDEX tokens_by_ratio ON tokens (max_ratio DESC);
CREATE INDEX tokens_by_kl ON tokens (max_kl DESC);
"""

GROUPS_OF_STEP = """
INSERT INTO groups
SELECT group_id, step, MIN(env_name), MIN(example_id),
    COALESCE(MIN(CASE WHEN failure IS NULL THEN state END), 'failed'),
    COUNT(*), COUNT(failure), AVG(reward), MIN(reward), MAX(reward), MAX(reward) - MIN(reward), SUM(num_tokens)
FROM rollouts WHERE step = ? GROUP BY group_id
"""
