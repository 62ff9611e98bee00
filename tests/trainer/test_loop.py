"""The order of things: what the orchestrator hears, and what is on the disk at that moment."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from runtime.errors import StorageError
from runtime.health.health import Health
from tests.trainer.runs import RUN_ID, FakeShutdown, record_batches
from tests.trainer.tiny import ALONE
from trainer.batches.inbox import Inbox, Reporter
from trainer.batches.replay import ReplaySource
from trainer.batches.source import NoBatch
from trainer.checkpoints import checkpoints as checkpoints_module
from trainer.checkpoints.checkpoints import Checkpoints, Origin
from trainer.checkpoints.manifest import checkpoint_dir, read_manifest, verify_files
from trainer.checkpoints.state import TrainState
from trainer.config.model import ModelConfig, OptimizerConfig
from trainer.config.trainer import TrainerConfig
from trainer.loop import Training, train
from trainer.losses.factory import make_loss
from trainer.model.policy import load_policy
from trainer.observe.non_finite import NonFiniteGuard
from trainer.observe.telemetry import Telemetry
from trainer.optimizer import make_optimizer
from trainer.planning.layout import Layout
from trainer.step.report import TrainProgress
from trainer.weights.files import FilePublisher
from transport.backoff import Backoff
from transport.outbox.progress import PublishedWeights
from transport.wire.manifest import BatchManifest
from transport.wire.sample import TrainingSample
from transport.wire.weights import read_weight_manifest

NUM_STEPS = 5


@dataclass
class Witness:
    """A recording that notes what it is told, and checks on the spot that it is true."""

    recording: ReplaySource
    checkpoints: Path
    told: list[str] = field(default_factory=list)

    def manifest(self, step: int) -> BatchManifest | NoBatch:
        return self.recording.manifest(step)

    def samples(self, manifest: BatchManifest, rows: Sequence[int]) -> Sequence[TrainingSample]:
        return self.recording.samples(manifest, rows)

    def published(self, weights: PublishedWeights) -> None:
        assert read_weight_manifest(Path(weights.location)).digest == weights.digest
        self.told.append(f"published {weights.version}")

    def trained(self, step: int) -> None:
        self.told.append(f"trained {step}")

    def committed(self, step: int) -> None:
        folder = checkpoint_dir(self.checkpoints, step)
        verify_files(folder, read_manifest(folder).files)
        self.told.append(f"committed {step}")

    def close(self, reason: str) -> None:
        self.told.append(reason)


@dataclass
class Bench:
    """A training run on a bench: `told` is what the orchestrator heard."""

    run: Training
    witness: Witness
    root: Path
    stop_after: int | None = None

    @property
    def told(self) -> list[str]:
        return self.witness.told

    def stop_requested(self) -> bool:
        return self.stop_after is not None and f"trained {self.stop_after}" in self.told

    def train(self) -> TrainProgress:
        progress = self.run.checkpoints.resume(self.run.state)
        return train(self.run, progress)


def make_bench(model_path: Path, root: Path, *, stop_after: int | None = None, **checkpoint: int) -> Bench:
    config = TrainerConfig(
        model=ModelConfig(path=model_path, seq_len=64), optimizer=OptimizerConfig(lr=1e-3), checkpoint=checkpoint
    )
    for name in ("recording", "weights", "checkpoints"):
        (root / name).mkdir(exist_ok=True)
    recording = ReplaySource(record_batches(root / "recording", RUN_ID, NUM_STEPS))
    witness = Witness(recording, root / "checkpoints")
    policy = load_policy(config.model, torch.device("cpu"))
    health = Health("trainer", 900)
    bench: Bench
    stop = FakeShutdown(lambda: bench.stop_requested())
    reporter = Reporter(witness, ALONE, stop=stop, health=health)
    checkpoints = Checkpoints(root / "checkpoints", Origin(RUN_ID, "digest", model_path), config.checkpoint, ALONE)
    checkpoints.report_commits(reporter.committed)
    run = Training(
        config=config,
        ranks=ALONE,
        layout=Layout(0, 1, config.micro_batch_tokens, config.model.seq_len),
        policy=policy,
        state=TrainState(policy.causal_lm, make_optimizer(policy.causal_lm, config.optimizer)),
        loss=make_loss(config.loss),
        inbox=Inbox(witness, ALONE, max_steps=None, stop=stop, health=health),
        reporter=reporter,
        publisher=FilePublisher(root / "weights", RUN_ID, 9, ALONE),
        checkpoints=checkpoints,
        non_finite=NonFiniteGuard(root / "non_finite", 3, ALONE, witness),
        telemetry=Telemetry(health, None),
    )
    bench = Bench(run, witness, root, stop_after)
    return bench


def steps(first: int, last: int, committed: set[int]) -> list[str]:
    """What is heard of these steps, each in its order."""
    heard = (
        [f"published {step}", f"trained {step}", *([f"committed {step}"] if step in committed else [])]
        for step in range(first, last + 1)
    )
    return list(itertools.chain.from_iterable(heard))


def test_a_version_is_published_before_trained_and_a_step_committed_after_its_checkpoint(model_path, tmp_path):
    bench = make_bench(model_path, tmp_path, interval_steps=2)
    progress = bench.train()
    assert bench.told == ["published 0", *steps(1, NUM_STEPS, {2, 4, 5})]
    assert progress.step == NUM_STEPS
    assert bench.run.inbox.ended


def test_a_stop_request_finishes_the_step_and_commits_it(model_path, tmp_path):
    bench = make_bench(model_path, tmp_path, interval_steps=10, stop_after=3)
    assert bench.train().step == 3
    assert bench.told == ["published 0", *steps(1, 3, {3})]
    assert not bench.run.inbox.ended


def test_a_restart_republishes_its_version_and_goes_on_with_the_next_step(model_path, tmp_path):
    make_bench(model_path, tmp_path, interval_steps=10, stop_after=3).train()
    again = make_bench(model_path, tmp_path, interval_steps=10)
    again.train()
    assert again.told == ["published 3", *steps(4, NUM_STEPS, {5})]


def test_a_finished_run_that_is_started_again_trains_nothing(model_path, tmp_path):
    make_bench(model_path, tmp_path).train()
    again = make_bench(model_path, tmp_path)
    assert again.train().step == NUM_STEPS
    assert again.told == [f"published {NUM_STEPS}"]


def test_a_failed_checkpoint_is_made_up_for_at_the_next_step(model_path, tmp_path):
    bench = make_bench(model_path, tmp_path, interval_steps=2)
    (tmp_path / "checkpoints" / "step-00000002").write_text("in the way")
    bench.train()
    assert bench.told == ["published 0", *steps(1, NUM_STEPS, {3, 4, 5})]


def test_a_last_checkpoint_that_cannot_be_made_is_not_committed(model_path, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints_module, "BACKOFF", Backoff(0.0, 0.0))
    bench = make_bench(model_path, tmp_path, interval_steps=10)
    (tmp_path / "checkpoints" / f"step-{NUM_STEPS:08d}").write_text("in the way")
    with pytest.raises(StorageError, match="3 checkpoints in a row"):
        bench.train()
    assert bench.told == ["published 0", *steps(1, NUM_STEPS, set())]
