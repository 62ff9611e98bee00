"""`transport inspect FILE [--json] [--rows N]`: look at any recorded batch. Checks every hash on the way."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from transport.batch import decode_batch
from transport.batch_file import BatchFile
from transport.errors import TransportError
from transport.sample import TrainingSample

_OK, _UNREADABLE = 0, 1


class SampleSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the listing."""

    row: int
    trajectory_id: str
    group_id: str
    env_name: str
    tokens: int
    loss_tokens: int
    frame_bytes: int
    reward: float
    advantage: float
    """Mean over the tokens if there is one per token."""
    temperature: float
    oldest_version: int | None


class BatchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A batch without its tokens."""

    path: str
    schema_version: int
    run_id: str
    step: int
    digest: str
    env_names: tuple[str, ...]
    samples: int
    tokens: int
    loss_tokens: int
    frame_bytes: int
    rows: tuple[SampleSummary, ...]


def summarize(file: BatchFile, max_rows: int | None = None) -> BatchSummary:
    """Read the whole batch, check every hash, and say what is in it (the first `max_rows` rows in detail)."""
    batch = file.batch()
    samples = decode_batch(batch)
    manifest, columns = batch.manifest, batch.manifest.columns
    rows = tuple(
        _summarize_sample(row, sample, len(frame))
        for row, (sample, frame) in enumerate(zip(samples[:max_rows], batch.frames[:max_rows], strict=True))
    )
    return BatchSummary(
        path=str(file.path),
        schema_version=manifest.schema_version,
        run_id=manifest.run_id,
        step=manifest.step,
        digest=manifest.digest,
        env_names=manifest.env_names,
        samples=manifest.num_samples,
        tokens=int(columns.lengths.numpy().sum()),
        loss_tokens=int(columns.loss_tokens.numpy().sum()),
        frame_bytes=batch.num_bytes,
        rows=rows,
    )


def _summarize_sample(row: int, sample: TrainingSample, frame_bytes: int) -> SampleSummary:
    advantages = sample.advantages
    return SampleSummary(
        row=row,
        trajectory_id=sample.trajectory_id,
        group_id=sample.group_id,
        env_name=sample.env_name,
        tokens=sample.num_tokens,
        loss_tokens=sample.num_loss_tokens,
        frame_bytes=frame_bytes,
        reward=sample.reward,
        advantage=advantages if isinstance(advantages, float) else float(np.mean(advantages.numpy())),
        temperature=sample.temperature,
        oldest_version=sample.oldest_version,
    )


def render(summary: BatchSummary, console: Console) -> None:
    """A table for people."""
    console.print(
        f"batch {summary.step} of run {summary.run_id} (schema {summary.schema_version}, digest {summary.digest}): "
        f"{summary.samples} samples, {summary.tokens} tokens, {summary.loss_tokens} trained, "
        f"{summary.frame_bytes / summary.tokens:.2f} bytes/token; all hashes hold",
        markup=False,
        highlight=False,
    )
    table = Table("row", "trajectory", "tokens", "trained", "reward", "advantage", "oldest version")
    for row in summary.rows:
        version = "-" if row.oldest_version is None else str(row.oldest_version)
        cells = (row.tokens, row.loss_tokens, f"{row.reward:.4g}", f"{row.advantage:+.4g}", version)
        # Ids come from data sets: they are printed as text, never read as markup.
        table.add_row(str(row.row), Text(row.trajectory_id), *map(str, cells))
    console.print(table)
    if len(summary.rows) < summary.samples:
        console.print(f"... and {summary.samples - len(summary.rows)} more (--rows)", markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 if the file cannot be trusted (the reason is on stderr); 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="transport", description="Tools for recorded batches.")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="print a recorded batch and check its hashes")
    inspect.add_argument("file", type=Path, help="an outbox/step-*.batch file")
    inspect.add_argument("--json", action="store_true", help="print JSON with every row")
    inspect.add_argument("--rows", type=int, default=20, help="rows in the table (default 20)")
    options = parser.parse_args(arguments)
    try:
        summary = summarize(BatchFile(options.file), None if options.json else max(0, options.rows))
    except TransportError as error:
        print(f"error: {error}", file=sys.stderr)
        return _UNREADABLE
    if options.json:
        print(msgspec.json.encode(summary).decode())
    else:
        render(summary, Console())
    return _OK
