"""Ways of splitting one batch that must not change its gradient."""

from dataclasses import dataclass

import numpy as np

from tests.trainer.core.tiny import make_sample, make_samples
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
from transport.wire.sample import TrainingSample
from transport.wire.tensor import EncodedTensor

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
