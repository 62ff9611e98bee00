"""Run by torchrun in `test_waiting_ranks.py`: two ranks that ask an orchestrator, one of them late.

    python -m tests.trainer.waiting_ranks <folder> <endpoint>

A rank that is late writes `<folder>/<call>.late` and asks only when `<folder>/<call>.go` is there. The other one writes
`<folder>/<call>.answered` when it has its answer.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import pytest
import torch

from runtime.errors import PeerLostError
from runtime.health.health import Health
from tests.support.waiting import until
from tests.trainer.runs import RUN_ID, FakeShutdown
from tests.trainer.tiny import TiedModel, save
from trainer.batches.inbox import Inbox, Reporter
from trainer.batches.orchestrator import OrchestratorLink
from trainer.batches.source import NoBatch
from trainer.checkpoints.checkpoints import Checkpoints, Origin
from trainer.checkpoints.state import TrainState
from trainer.config.model import OptimizerConfig
from trainer.config.trainer import CheckpointConfig, OrchestratorLinkConfig, TokenExportConfig
from trainer.observe.token_export import STABLE, TokenExport, TokenRecord, TokenRecorder, step_folder
from trainer.optimizer import make_optimizer
from trainer.ranks import Ranks, join
from transport.outbox.progress import PublishedWeights
from transport.wire.manifest import BatchManifest
from transport.wire.sample import TrainingSample

TIMEOUT_S = 5.0
"""Seconds after which a collective of the ranks fails."""
AWAY_S = 1.3 * TIMEOUT_S
"""Seconds that a rank waits for what the other one has."""
NUM_STEPS = 2


_T = TypeVar("_T")
LATE = {"manifest": 1, "samples": 1, "published": 0}
"""The rank that is late with its call for batch 1."""
DEADLINE_S = 300.0


class LateLink:
    """A `BatchSource` and `ProgressReports`: a real link, whose rank is late with some calls."""

    def __init__(self, link: OrchestratorLink, rank: int, folder: Path) -> None:
        self._link = link
        self._rank = rank
        self._folder = folder
        self.trained, self.committed, self.close = link.trained, link.committed, link.close

    def manifest(self, step: int) -> BatchManifest | NoBatch:
        return self._timed("manifest", step, lambda: self._link.manifest(step))

    def samples(self, manifest: BatchManifest, rows: Sequence[int]) -> Sequence[TrainingSample]:
        return self._timed("samples", manifest.step, lambda: self._link.samples(manifest, rows))

    def published(self, weights: PublishedWeights) -> None:
        self._timed("published", weights.version, lambda: self._link.published(weights))

    def _timed(self, call: str, step: int, ask: Callable[[], _T]) -> _T:
        if step == 1 and LATE[call] == self._rank:
            (self._folder / f"{call}.late").touch()
            until((self._folder / f"{call}.go").exists, DEADLINE_S)
        answer = ask()
        if step == 1 and LATE[call] != self._rank:
            (self._folder / f"{call}.answered").touch()
        return answer


def work_for(duration_s: float) -> None:
    """Be busy with something of one's own."""
    done_at = time.monotonic() + duration_s
    until(lambda: time.monotonic() > done_at, DEADLINE_S)


def train(ranks: Ranks, inbox: Inbox, reporter: Reporter, folder: Path) -> None:
    """As the loop does, without a model."""
    trained = []
    for batch in inbox.batches(after=0):
        samples = inbox.fetch(batch, [ranks.rank])
        ranks.require_same(str(batch.step), "what is trained")
        reporter.published(PublishedWeights(version=batch.step, location=f"/weights/{batch.step}", digest="digest"))
        reporter.trained(batch.step)
        reporter.committed(batch.step)
        trained.append(f"{batch.step}: {samples[ranks.rank].trajectory_id}")
    assert inbox.ended
    (folder / f"trained.{ranks.rank}").write_text("\n".join(trained))


def fail_alone(ranks: Ranks) -> None:
    """A rank that gives up ends the others, which still wait, with its words."""
    said = "lost the orchestrator while waiting for batch 9"

    def give_up() -> None:
        if ranks.rank == 1:
            raise PeerLostError(said)
        until(lambda: False, DEADLINE_S)

    with pytest.raises(PeerLostError) as raised:
        ranks.wait_together(give_up)
    assert str(raised.value) == (f"rank 1: {said}" if ranks.is_first else said)


def stop_all(ranks: Ranks) -> None:
    """Only the first rank is asked to stop; the others, which wait for a batch, end their wait, too."""
    stop = FakeShutdown(lambda: ranks.is_first)
    ranks.wait_together(lambda: until(lambda: stop.requested, DEADLINE_S), stop=stop)


def work_long_alone(ranks: Ranks) -> None:
    """The first rank, on a slow disk, takes longer than the others would wait for it in a collective."""

    def work() -> bytes:
        work_for(AWAY_S if ranks.is_first else 0)
        return str(ranks.rank).encode()

    assert ranks.together(work) == [b"0", b"1"]


class SlowRecorder:
    """Takes its time to write down what was recorded."""

    def __init__(self, delay_s: float) -> None:
        self.step = 1
        self._delay_s = delay_s

    def records(self) -> list[TokenRecord]:
        work_for(self._delay_s)
        return []


def export_slowly(ranks: Ranks, folder: Path) -> None:
    export = TokenExport(TokenExportConfig(), folder, ranks, seed=0)
    export.write(cast(TokenRecorder, SlowRecorder(0.0 if ranks.is_first else AWAY_S)))
    assert (step_folder(folder, 1) / STABLE).exists()


class SlowModel(TiedModel):
    """Takes its time to give its tensors away."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self._delay_s = delay_s

    def state_dict(self, *args: object, **options: object) -> dict[str, torch.Tensor]:
        work_for(self._delay_s)
        return super().state_dict(*args, **options)


def save_and_resume_slowly(ranks: Ranks, root: Path) -> None:
    """torch's ranks meet while they write and read a checkpoint: here, too, one may take longer."""
    root.mkdir(exist_ok=True)
    (root / "model").mkdir(exist_ok=True)
    model = SlowModel(0.0 if ranks.is_first else AWAY_S)
    checkpoints = Checkpoints(root, Origin("run", "digest", root / "model"), CheckpointConfig(), ranks)
    state = TrainState(model, make_optimizer(model, OptimizerConfig(lr=1e-2)))
    assert save(checkpoints, state, step=3)
    assert checkpoints.resume(state).step == 3


def join_when_both_are_here(folder: Path) -> Ranks:
    """Importing torch may take one of them much longer on a busy machine."""
    (folder / f"here.{os.environ['RANK']}").touch()
    until(lambda: all((folder / f"here.{rank}").exists() for rank in range(2)), DEADLINE_S)
    return join("cpu", TIMEOUT_S)


def main(folder: Path, endpoint: str) -> None:
    ranks = join_when_both_are_here(folder)
    health = Health("trainer", 900)
    config = OrchestratorLinkConfig(endpoint=endpoint, connect_timeout_s=DEADLINE_S, lost_timeout_s=DEADLINE_S)
    link = OrchestratorLink(config, RUN_ID, ranks, last_committed=0, health=health, stop_requested=lambda: False)
    ranks.wait_together(link.connect)
    source = LateLink(link, ranks.rank, folder)
    inbox = Inbox(source, ranks, max_steps=NUM_STEPS, stop=FakeShutdown(), health=health)
    reporter = Reporter(source, ranks, stop=FakeShutdown(), health=health)
    train(ranks, inbox, reporter, folder)
    inbox.close("done")
    stop_all(ranks)
    work_long_alone(ranks)
    export_slowly(ranks, folder / "tokens")
    save_and_resume_slowly(ranks, folder / "checkpoints")
    fail_alone(ranks)
    ranks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
