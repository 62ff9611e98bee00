"""`transport inspect FILE [--json] [--rows N]`: look at any recorded batch. Checks every hash on the way."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from transport.errors import TransportError
from transport.outbox.outbox import BatchFile
from transport.wire.codec import decode_batch
from transport.wire.sample import TrainingSample

_OK, _UNREADABLE = 0, 1


def _summary(file: BatchFile) -> dict[str, Any]:
    """A batch without its tokens; every hash is checked."""
    batch = file.batch()
    manifest, columns = batch.manifest, batch.manifest.columns
    return {
        "path": str(file.path),
        "schema_version": manifest.schema_version,
        "run_id": manifest.run_id,
        "step": manifest.step,
        "digest": manifest.digest,
        "env_names": manifest.env_names,
        "samples": manifest.num_samples,
        "tokens": int(columns.lengths.numpy().sum()),
        "loss_tokens": int(columns.loss_tokens.numpy().sum()),
        "frame_bytes": batch.num_bytes,
        "rows": [
            {"row": row, "frame_bytes": len(frame)} | _row(sample)
            for row, (sample, frame) in enumerate(zip(decode_batch(batch), batch.frames, strict=True))
        ],
    }


def _row(sample: TrainingSample) -> dict[str, Any]:
    advantages = sample.advantages
    return {
        "trajectory_id": sample.trajectory_id,
        "group_id": sample.group_id,
        "env_name": sample.env_name,
        "tokens": sample.num_tokens,
        "loss_tokens": sample.num_loss_tokens,
        "reward": sample.reward,
        "advantage": advantages if isinstance(advantages, float) else float(np.mean(advantages.numpy())),
        "temperature": sample.temperature,
        "oldest_version": sample.oldest_version,
    }


def _render(batch: dict[str, Any], max_rows: int) -> None:
    """A table for people, with the first rows."""
    console = Console()
    console.print(
        f"batch {batch['step']} of run {batch['run_id']} (schema {batch['schema_version']}, digest {batch['digest']}): "
        f"{batch['samples']} samples, {batch['tokens']} tokens, {batch['loss_tokens']} trained, "
        f"{batch['frame_bytes'] / batch['tokens']:.2f} bytes/token; all hashes hold",
        markup=False,
        highlight=False,
    )
    table = Table("row", "trajectory", "tokens", "trained", "reward", "advantage", "oldest version")
    for row in batch["rows"][:max_rows]:
        version = "-" if row["oldest_version"] is None else row["oldest_version"]
        cells = (row["tokens"], row["loss_tokens"], f"{row['reward']:.4g}", f"{row['advantage']:+.4g}", version)
        # Ids come from data sets: they are printed as text, never read as markup.
        table.add_row(str(row["row"]), Text(row["trajectory_id"]), *map(str, cells))
    console.print(table)
    if max_rows < batch["samples"]:
        console.print(f"... and {batch['samples'] - max_rows} more (--rows)", markup=False)


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
        summary = _summary(BatchFile(options.file))
    except TransportError as error:
        print(f"error: {error}", file=sys.stderr)
        return _UNREADABLE
    if options.json:
        print(msgspec.json.encode(summary).decode())
    else:
        _render(summary, max(0, options.rows))
    return _OK
