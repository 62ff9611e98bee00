"""Samples and batches for the transport tests: a pure function of their numbers."""

import numpy as np

from transport.wire.codec import EncodedBatch, build_batch
from transport.wire.sample import EncodedTensor, TrainingSample, VersionSpan

RUN = "test-run"


def make_sample(number: int, num_tokens: int = 32, run_id: str = RUN, **changes: object) -> TrainingSample:
    """Sample `number`: the same bytes every time."""
    random = np.random.default_rng(number)
    mask = np.arange(num_tokens) >= max(1, num_tokens // 4)
    fields: dict[str, object] = {
        "run_id": run_id,
        "env_name": f"env-{number % 2}",
        "example_id": str(number),
        "group_id": f"env-{number % 2}/{number // 2}/0",
        "trajectory_id": f"env-{number % 2}/{number // 2}/0#{number}",
        "token_ids": EncodedTensor.of(random.integers(0, 1000, num_tokens, dtype=np.int32)),
        "loss_mask": EncodedTensor.of(mask),
        "logprobs": EncodedTensor.of(-random.random(num_tokens, dtype=np.float32)),
        "advantages": float(random.standard_normal()),
        "temperature": 1.0,
        "reward": float(number % 2),
        "versions": (VersionSpan(number % 3, min(1, num_tokens - 1), num_tokens),),
    }
    return TrainingSample(**(fields | changes))  # type: ignore[arg-type]


def make_batch(step: int, num_samples: int = 8, num_tokens: int = 32, run_id: str = RUN) -> EncodedBatch:
    """Batch `step`: the same bytes every time, other bytes than any other step's."""
    samples = [make_sample(1000 * step + number, num_tokens, run_id) for number in range(num_samples)]
    return build_batch(run_id, step, samples)
