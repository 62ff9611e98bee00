"""Ways of splitting one batch that must not change its gradient."""

from dataclasses import dataclass

import numpy as np

from tests.trainer.core.tiny import make_sample, make_samples
from transport.sample import TrainingSample
from transport.tensor import EncodedTensor

SEQ_LEN = 48
MIXED_LENGTHS = [30, 8, 17, 41, 5, 23, 60, 12, 9, 34, 2, 27]
"""One is above SEQ_LEN, one is as short as a trained sample can be."""


@dataclass(frozen=True)
class Scenario:
    batch: str
    cap: int = SEQ_LEN
    pad_multiple: int = 1
    shuffle_seed: int | None = None


SCENARIOS = {
    "packed": Scenario("mixed"),
    "one sample per row": Scenario("mixed", cap=2),
    "smaller cap": Scenario("mixed", cap=32),
    "padded rows": Scenario("mixed", pad_multiple=16),
    "another order": Scenario("mixed", shuffle_seed=7),
    "fewer samples than ranks": Scenario("single", pad_multiple=4),
    "unequal tokens per rank": Scenario("unequal"),
    "three components": Scenario("weighted", cap=32),
}
BATCHES = ("mixed", "single", "unequal", "weighted")


def batch_of(name: str) -> list[TrainingSample]:
    """The samples of a batch, always the same."""
    if name == "single":
        return make_samples([19])
    if name == "unequal":
        return make_samples([48, 3, 3, 4, 46], seed=3)
    if name == "weighted":
        return _weighted()
    return make_samples(MIXED_LENGTHS, seed=1)


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
