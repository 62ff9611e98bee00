"""Saved rollouts: every group of a batch, trained or not, one JSON line per rollout, in `rollouts/step-*.jsonl`.

Written off the loop, just before its batch becomes durable, by rename: a batch that is cut again after a crash
replaces its file. A disk that refuses costs the file and one warning, not the run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from loguru import logger

from chat.trajectory import Branch
from orchestrator.records.ledger import failed_state, terminal_states
from orchestrator.values.group import AssembledBatch, ScoredGroup
from orchestrator.values.rollout import Rollout, RolloutFailure
from transport.durable import atomic_write


def rollout_log_path(folder: Path, step: int) -> Path:
    """Where the rollouts of batch `step` lie."""
    return folder / f"step-{step:08d}.jsonl"


def rollout_rows(batch: AssembledBatch) -> Iterator[dict[str, Any]]:
    """One row per dispatched rollout: what it is, what became of it, and what was said. Failed tries come first."""
    for scored in batch.groups:
        for index, failure in scored.group.failed_tries:
            yield _head(scored, index) | {"state": failed_state(failure), "advantage": None} | failure_row(failure)
        advantages = dict(zip((index for index, _ in scored.group.survivors), scored.advantages, strict=False))
        states = terminal_states(scored, batch.step)
        for index, (result, state) in enumerate(zip(scored.group.results, states, strict=True)):
            head = _head(scored, index) | {"state": state, "advantage": advantages.get(index)}
            yield head | (failure_row(result) if isinstance(result, RolloutFailure) else rollout_row(result))


def _head(scored: ScoredGroup, index: int) -> dict[str, Any]:
    key = scored.group.ticket.key
    return {
        "env_name": key.env_name,
        "example_id": key.example_id,
        "group_id": key.id,
        "trajectory_id": f"{key.id}#{index}",
    }


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    """What is saved of a finished rollout."""
    versions = [span.version for branch in rollout.branches for span in branch.versions]
    return {
        "reward": rollout.reward,
        "metrics": rollout.metrics,
        "num_tokens": rollout.num_tokens,
        "num_sampled_tokens": rollout.num_sampled_tokens,
        "num_branches": len(rollout.branches),
        "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None),
        "is_truncated": rollout.is_truncated,
        "temperature": rollout.temperature,
        "duration_s": rollout.duration_s,
        "messages": rollout.messages,
        "state_columns": {
            "trajectory": [_branch(branch) for branch in rollout.branches],
            "sampling_args": rollout.sampling_args,
            **{name: msgspec.Raw(column) for name, column in rollout.columns.items()},
        },
    }


def _branch(branch: Branch) -> dict[str, Any]:
    return {
        "num_tokens": len(branch.token_ids),
        "num_sampled_tokens": int(np.count_nonzero(branch.sampled)),
        "versions": branch.versions,
        **({} if branch.images is None else {"num_images": len(branch.images.digests)}),
    }


def failure_row(failure: RolloutFailure) -> dict[str, Any]:
    """What is saved of a failed one."""
    return {"failure": failure.reason.value, "message": failure.message}


class RolloutLog:
    """Blocking writer. `None` for `folder` turns it off."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._warned = False

    def write(self, batch: AssembledBatch) -> None:
        """Save the rollouts of `batch`; never raises for a full disk."""
        if self._folder is None:
            return
        # What an environment puts into messages is its own affair: what JSON does not know is written as text.
        lines = (msgspec.json.encode(row, enc_hook=str) + b"\n" for row in rollout_rows(batch))
        try:
            atomic_write(rollout_log_path(self._folder, batch.step), b"".join(lines))
        except OSError as error:
            if not self._warned:
                logger.warning(f"rollouts are not saved ({error}); the run goes on without them")
            self._warned = True
