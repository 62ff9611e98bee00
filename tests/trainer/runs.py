"""Recorded batches, runs of the trainer on them, and what a run needs: an orchestrator, a request to stop."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from tests.support.fakes import Served
from trainer.cli import run
from transport.durable import write_durably
from transport.outbox.outbox import Outbox, batch_path, file_chunks
from transport.wire.codec import EncodedBatch, build_batch
from transport.wire.sample import EncodedTensor, TrainingSample, VersionSpan
from transport.wire.weights import version_dir

RUN_ID = "shell"
VOCAB = 64


def make_sample(run_id: str, step: int, index: int, scale: float = 1.0) -> TrainingSample:
    """A sample of 6 to 20 tokens, of which the second half is trained; `scale` is the size of its advantage."""
    random = np.random.default_rng([step, index])
    length = int(random.integers(6, 21))
    mask = np.arange(length) >= length // 2
    return TrainingSample(
        run_id=run_id,
        env_name="copy" if index % 2 else "reverse",
        example_id=str(index // 2),
        group_id=f"copy/{index // 2}/{step}",
        trajectory_id=f"copy/{index // 2}/{step}#{index}",
        token_ids=EncodedTensor.of(random.integers(0, VOCAB, length, dtype=np.int32)),
        loss_mask=EncodedTensor.of(mask),
        logprobs=EncodedTensor.of(np.where(mask, -4.0, 0.0).astype(np.float32)),
        advantages=float(random.choice([-scale, scale])),
        temperature=1.0,
        reward=float(random.random()),
        versions=(VersionSpan(step - 1, length // 2, length),),
    )


def make_batch(run_id: str, step: int, num_samples: int = 8, scale: float = 1.0) -> EncodedBatch:
    """Batch `step`; the same arguments give the same bytes."""
    return build_batch(run_id, step, [make_sample(run_id, step, index, scale) for index in range(num_samples)])


def record_batches(folder: Path, run_id: str, num_steps: int) -> Path:
    """Write batches `1..num_steps` as an outbox would."""
    for step in range(1, num_steps + 1):
        write_durably(batch_path(folder, step), file_chunks(make_batch(run_id, step)))
    return folder


COMMON = ("--model.seq-len", "64", "--optimizer.lr", "1e-3", "--health.port", "0", "--no-metrics.tensorboard")


def arguments(model: Path, runs: Path, name: str, *flags: str) -> list[str]:
    """Command line of the trainer for run `name` below `runs`."""
    return ["--model.path", str(model), "--run.dir", str(runs), "--run.name", name, *COMMON, *flags]


def replay(model: Path, recording: Path, runs: Path, name: str, *flags: str) -> Path:
    """Replay in this process; the run directory."""
    code = run(arguments(model, runs, name, "--replay", str(recording), *flags))
    assert code == 0
    return runs / name


def torchrun(num_ranks: int, *arguments: str) -> tuple[str, ...]:
    """Words of the module that starts `num_ranks` processes of what `arguments` name."""
    return ("torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), *arguments)


def weights_of(run_dir: Path, version: int) -> dict[str, torch.Tensor]:
    """Tensors of a publish."""
    folder = version_dir(run_dir / "weights", version)
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def weight_bytes(run_dir: Path, version: int) -> bytes:
    """The safetensors files of a publish, end to end."""
    folder = version_dir(run_dir / "weights", version)
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))


class FakeOrchestrator(Served):
    """Serves the batches that it is told to publish."""

    def __init__(self, folder: Path, run_id: str, endpoint: str = "tcp://127.0.0.1:0") -> None:
        self.outbox = Outbox(folder, run_id, keep_retired=True)
        super().__init__(self.outbox, endpoint)
        self._run_id = run_id

    def publish(self, *steps: int) -> None:
        """Store and announce these batches."""
        for step in steps:
            self.call(self.server.publish(make_batch(self._run_id, step)))

    def end(self, last_step: int) -> None:
        """Tell the trainer that the run is over after `last_step`."""
        self._loop.call_soon_threadsafe(self.server.end, last_step)

    @property
    def progress(self) -> tuple[int, int]:
        """(last trained, last committed)."""
        return self.outbox.progress.last_trained, self.outbox.progress.last_committed

    @property
    def version(self) -> int | None:
        """Newest policy version that was announced."""
        weights = self.outbox.progress.weights
        return None if weights is None else weights.version


class FakeShutdown:
    """In the place of a `Shutdown`: made by `request`, or as soon as `condition` says so."""

    def __init__(self, condition: Callable[[], bool] = lambda: False) -> None:
        self._condition = condition
        self._was_made = False

    @property
    def requested(self) -> bool:
        return self._was_made or self._condition()

    def request(self) -> None:
        self._was_made = True
