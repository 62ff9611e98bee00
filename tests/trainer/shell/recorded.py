"""Random but reproducible samples and batches."""

from pathlib import Path

import numpy as np

from transport.durable import write_durably
from transport.outbox.batch_file import file_chunks
from transport.outbox.outbox import batch_path
from transport.wire.batch import EncodedBatch, build_batch
from transport.wire.sample import TrainingSample, VersionSpan
from transport.wire.tensor import EncodedTensor

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
