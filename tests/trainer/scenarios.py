"""A tiny random Qwen3, batches of random samples for it, and ways of splitting a batch that keep its gradient."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.support.models import NO_SPECIAL, make_model
from trainer.arrays import IntArray
from trainer.config.loss import (
    CispoLossConfig,
    DppoLossConfig,
    GrpoClipHigherLossConfig,
    GspoLossConfig,
    IpoLossConfig,
    LossConfig,
    PpoClipLossConfig,
    ReinforceLossConfig,
)
from trainer.planning.layout import Layout, Weighting
from transport.wire.codec import batch_digest, encode, frame_hash
from transport.wire.manifest import SCHEMA_VERSION, TEXT, BatchManifest, SampleColumns
from transport.wire.sample import EncodedTensor, TrainingSample

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


SEQ_LEN = 48
MIXED_LENGTHS = [30, 8, 17, 41, 5, 23, 60, 12, 9, 34, 2, 27]
"""One is above SEQ_LEN, one is as short as a trained sample can be."""


LOSSES: dict[str, LossConfig] = {
    "dppo": DppoLossConfig(),
    "ipo": IpoLossConfig(delta=0.1),
    "ppo_clip": PpoClipLossConfig(epsilon=0.2),
    "grpo_clip_higher": GrpoClipHigherLossConfig(epsilon_low=0.2, epsilon_high=0.28),
    "gspo": GspoLossConfig(epsilon_low=0.3, epsilon_high=0.1),
    "cispo": CispoLossConfig(epsilon_low=0.5, epsilon_high=1.0),
    "reinforce": ReinforceLossConfig(),
}
"""Every built-in loss, with the limits that `reference.py` knows."""


@dataclass(frozen=True)
class Scenario:
    batch: str
    cap: int = SEQ_LEN
    pad_multiple: int = 1
    shuffle_seed: int | None = None
    loss: str = "dppo"
    weighting: Weighting = Weighting.TOKEN
    mini_batches: int = 1

    def layout(self, rank: int, world_size: int) -> Layout:
        return Layout(rank, world_size, self.cap, SEQ_LEN, self.mini_batches, weighting=self.weighting)


SCENARIOS = {
    "packed": Scenario("mixed"),
    "one sample per row": Scenario("mixed", cap=2),
    "smaller cap": Scenario("mixed", cap=32),
    "padded rows": Scenario("mixed", pad_multiple=16),
    "another order": Scenario("mixed", shuffle_seed=7),
    "fewer samples than ranks": Scenario("single", pad_multiple=4),
    "unequal tokens per rank": Scenario("unequal"),
    "three components": Scenario("weighted", cap=32),
    **{loss: Scenario("weighted", cap=32, loss=loss) for loss in LOSSES},
    **{f"{loss} in mini-batches": Scenario("branched", cap=32, loss=loss, mini_batches=2) for loss in LOSSES},
    **{f"by {weighting}": Scenario("branched", cap=32, weighting=weighting) for weighting in Weighting},
    "components by trajectory": Scenario("weighted", cap=32, weighting=Weighting.TRAJECTORY),
    "by group in mini-batches": Scenario("branched", cap=32, weighting=Weighting.GROUP, mini_batches=3),
}


def batch_of(name: str) -> list[TrainingSample]:
    """The samples of a batch, always the same."""
    if name == "single":
        return make_samples([19])
    if name == "unequal":
        return make_samples([48, 3, 3, 4, 46], seed=3)
    if name == "weighted":
        return _weighted()
    if name == "branched":
        return _branched()
    return make_samples(MIXED_LENGTHS, seed=1)


def _branched() -> list[TrainingSample]:
    """Twelve samples of five trajectories in two groups; samples of one trajectory do not stand together."""
    trajectories = [0, 1, 0, 2, 2, 3, 0, 4, 2, 3, 1, 4]
    rng = np.random.default_rng(2)
    return [
        make_sample(row, length, rng, trajectory_id=f"t{trajectory}", group_id=f"g{trajectory // 3}")
        for row, (length, trajectory) in enumerate(zip(MIXED_LENGTHS, trajectories, strict=True))
    ]


def ordered(scenario: Scenario) -> list[TrainingSample]:
    """The batch in the order the scenario asks for."""
    samples = batch_of(scenario.batch)
    if scenario.shuffle_seed is None:
        return samples
    return [samples[index] for index in np.random.default_rng(scenario.shuffle_seed).permutation(len(samples))]


def _weighted() -> list[TrainingSample]:
    """Plain, supervised, distilled and mixed samples in one batch, with an advantage per token."""
    rng = np.random.default_rng(5)

    def column(length: int, low: float, high: float) -> EncodedTensor:
        values = rng.uniform(low, high, length)
        return EncodedTensor.of(np.where(rng.random(length) < 0.3, 0.0, values).astype(np.float32))

    zeros = EncodedTensor.of(np.zeros(21, dtype=np.float32))
    return [
        make_sample(0, 20, rng, advantages=column(20, -1, 1)),
        make_sample(1, 21, rng, rl_weights=zeros, ce_weights=column(21, 0.5, 2)),
        make_sample(2, 13, rng, rl_weights=column(13, 0.5, 2)),
        make_sample(3, 26, rng, ref_kl_weights=column(26, 0.1, 1), ref_logprobs=column(26, -4, -1)),
        make_sample(
            4, 16, rng, ce_weights=column(16, 0.1, 1), ref_kl_weights=column(16, 1, 2), ref_logprobs=column(16, -3, 0)
        ),
    ]
