"""`FakeSource`: random samples instead of an orchestrator, to measure or debug the trainer alone.

Batch `step` is a pure function of config, seed and step: all ranks, and a resumed run, see the same bytes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.batches.source import NoBatch
from trainer.config.trainer import FakeDataConfig
from transport.wire.codec import build_batch, decode_rows
from transport.wire.manifest import BatchManifest
from transport.wire.sample import EncodedTensor, TrainingSample

ENV_NAME = "fake"
PROMPT_SHARE = 0.5
"""Of the tokens of a sample; the rest is trained."""
GROUP_SIZE = 8
"""Samples per group, each a trajectory of its own, as by default in `envs[].group_size` of the orchestrator."""
SIGMA = 0.9
"""Spread of `lognormal`: standard deviation of the log of the length, as the benchmarks of packing have it."""


class FakeSource:
    """A `BatchSource`: endless batches of `config.batch_size` samples of at most `seq_len` tokens."""

    def __init__(
        self,
        config: FakeDataConfig,
        run_id: str,
        *,
        seq_len: int,
        vocab_size: int,
        seed: int,
        advantage_is_reward: bool = False,
    ) -> None:
        self._config = config
        self._run_id = run_id
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._seed = seed
        self._advantage_is_reward = advantage_is_reward
        """As for a trainer with a critic."""

    def manifest(self, step: int) -> BatchManifest | NoBatch:
        """Batch `step`; there is always one."""
        return build_batch(self._run_id, step, self._samples(step)).manifest

    def samples(self, manifest: BatchManifest, rows: Sequence[int]) -> Sequence[TrainingSample]:
        batch = build_batch(self._run_id, manifest.step, self._samples(manifest.step))
        return decode_rows(batch.manifest, rows, [batch.frames[row] for row in rows])

    def close(self, reason: str) -> None:
        """Does nothing: there is no connection."""

    def _samples(self, step: int) -> list[TrainingSample]:
        rng = np.random.default_rng((self._seed, step))
        lengths = fake_lengths(self._config, self._seq_len, rng)
        return [self._sample(row, length, rng) for row, length in enumerate(lengths.tolist())]

    def _sample(self, row: int, length: int, rng: np.random.Generator) -> TrainingSample:
        group, member = divmod(row, GROUP_SIZE)
        is_trained = np.arange(length) >= max(1, int(length * PROMPT_SHARE))
        logprobs = np.where(is_trained, -np.log(self._vocab_size) + rng.normal(0, 0.1, length), 0.0).clip(max=0.0)
        advantage, reward = float(rng.normal()), float(rng.random())
        return probe_sample(
            rng.integers(0, self._vocab_size, length),
            is_trained,
            env_name=ENV_NAME,
            group=group,
            member=member,
            run_id=self._run_id,
            logprobs=EncodedTensor.of(logprobs.astype(np.float32)),
            advantages=reward if self._advantage_is_reward else advantage,
            reward=reward,
        )


def fake_lengths(config: FakeDataConfig, seq_len: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Tokens of each sample, by the configured distribution, at least 2 and at most `seq_len`."""
    match config.lengths:
        case "fixed":
            drawn = np.full(config.batch_size, float(config.mean_tokens))
        case "uniform":
            drawn = rng.uniform(2, 2 * config.mean_tokens - 2, config.batch_size)
        case "lognormal":
            median = config.mean_tokens / np.exp(SIGMA**2 / 2)  # so that the mean is what was asked for
            drawn = rng.lognormal(np.log(median), SIGMA, config.batch_size)
    return drawn.round().clip(2, seq_len).astype(np.int64)


def probe_sample(
    token_ids: npt.NDArray[np.integer[Any]],
    is_trained: npt.NDArray[np.bool_] | bool = True,
    *,
    env_name: str = "probe",
    group: int = 0,
    member: int = 0,
    **fields: Any,
) -> TrainingSample:
    """Member `member` of group `group`; the first token is never trained. `fields` are others of `TrainingSample`."""
    group_id = f"{env_name}/{group}/0"
    defaults: dict[str, Any] = {
        "run_id": env_name,
        "logprobs": EncodedTensor.of(np.zeros(len(token_ids), dtype=np.float32)),
        "advantages": 0.0,
        "reward": 0.0,
    }
    return TrainingSample(
        env_name=env_name,
        example_id=str(group),
        group_id=group_id,
        trajectory_id=f"{group_id}#{member}",
        token_ids=EncodedTensor.of(token_ids.astype(np.int32)),
        loss_mask=EncodedTensor.of((np.arange(len(token_ids)) > 0) & is_trained),
        temperature=1.0,
        versions=(),
        **(defaults | fields),
    )
