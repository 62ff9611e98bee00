"""A tiny random Qwen3 and batches of random samples for it: the data that all tests of the numeric core share."""

from pathlib import Path

import numpy as np

from tests.support.models import NO_SPECIAL, make_model
from trainer.arrays import IntArray
from transport.wire.codec import batch_digest, encode, frame_hash
from transport.wire.manifest import SCHEMA_VERSION, TEXT, BatchManifest, SampleColumns
from transport.wire.sample import TrainingSample
from transport.wire.tensor import EncodedTensor

VOCAB_SIZE = 64
ENV_NAMES = ("copy", "reverse")


def save_tiny_model(path: Path, **changes: object) -> Path:
    """A random model without a tokenizer."""
    make_model(0, **{"vocab_size": VOCAB_SIZE, **NO_SPECIAL, **changes}).save_pretrained(path)  # type: ignore[arg-type]
    return path


def make_sample(index: int, num_tokens: int, rng: np.random.Generator, **changes: object) -> TrainingSample:
    """A random sample: half prompt, half completion, behaviour logprobs near those of a random policy."""
    loss_mask = np.arange(num_tokens) >= max(1, num_tokens // 2)
    logprobs = np.where(loss_mask, rng.normal(-3.0, 1.0, num_tokens).clip(max=-0.05), 0.0).astype(np.float32)
    env_name = ENV_NAMES[index % 2]
    fields: dict[str, object] = {
        "run_id": "test",
        "env_name": env_name,
        "example_id": str(index // 4),
        "group_id": f"{env_name}/{index // 4}/0",
        "trajectory_id": f"{env_name}/{index // 4}/0#{index}",
        "token_ids": EncodedTensor.of(rng.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32)),
        "loss_mask": EncodedTensor.of(loss_mask),
        "logprobs": EncodedTensor.of(logprobs),
        "advantages": float(rng.normal()),
        "temperature": (1.0, 0.7, 1.3)[index % 3],
        "reward": float(rng.random()),
        "versions": (),
    }
    return TrainingSample(**{**fields, **changes})  # type: ignore[arg-type]


def make_samples(lengths: list[int], seed: int = 0) -> list[TrainingSample]:
    rng = np.random.default_rng(seed)
    return [make_sample(index, length, rng) for index, length in enumerate(lengths)]


def make_manifest(samples: list[TrainingSample], step: int = 1) -> BatchManifest:
    """The manifest an orchestrator would send for these samples."""
    frames = [encode(sample) for sample in samples]
    hashes = EncodedTensor.of(np.array([frame_hash(frame) for frame in frames], dtype=np.uint64))
    trajectories = list(dict.fromkeys(sample.trajectory_id for sample in samples))
    groups = list(dict.fromkeys(sample.group_id for sample in samples))
    columns = SampleColumns(
        lengths=_int32([sample.num_tokens for sample in samples]),
        loss_tokens=_int32([sample.num_loss_tokens for sample in samples]),
        env_ids=_int32([ENV_NAMES.index(sample.env_name) for sample in samples]),
        groups=_int32([groups.index(sample.group_id) for sample in samples]),
        trajectories=_int32([trajectories.index(sample.trajectory_id) for sample in samples]),
        modalities=EncodedTensor.of(np.full(len(samples), TEXT, dtype=np.uint8)),
        num_bytes=EncodedTensor.of(np.array([len(frame) for frame in frames], dtype=np.int64)),
        oldest_versions=_int32([-1] * len(samples)),
        frame_hashes=hashes,
    )
    return BatchManifest(
        schema_version=SCHEMA_VERSION,
        run_id="test",
        step=step,
        digest=batch_digest(hashes),
        env_names=ENV_NAMES,
        columns=columns,
    )


def bare_manifest(lengths: "list[int] | IntArray", trajectories: list[int] | None = None) -> BatchManifest:
    """A manifest of these lengths whose samples do not exist: all that planning needs."""
    num_samples = len(lengths)
    zeros = _int32([0] * num_samples)
    hashes = EncodedTensor.of(np.arange(num_samples, dtype=np.uint64))
    columns = SampleColumns(
        lengths=_int32(lengths),
        loss_tokens=_int32(np.asarray(lengths) // 2),
        env_ids=zeros,
        groups=zeros,
        trajectories=_int32(range(num_samples) if trajectories is None else trajectories),
        modalities=EncodedTensor.of(np.full(num_samples, TEXT, dtype=np.uint8)),
        num_bytes=EncodedTensor.of(np.zeros(num_samples, dtype=np.int64)),
        oldest_versions=zeros,
        frame_hashes=hashes,
    )
    return BatchManifest(
        schema_version=SCHEMA_VERSION,
        run_id="test",
        step=1,
        digest=batch_digest(hashes),
        env_names=ENV_NAMES,
        columns=columns,
    )


def _int32(values: "list[int] | range | IntArray") -> EncodedTensor:
    return EncodedTensor.of(np.asarray(values, dtype=np.int32))
