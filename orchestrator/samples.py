"""Rollout to `TrainingSample`s: one per branch."""

import numpy as np

from orchestrator.rollout import Bools, Branch, Rollout
from transport.sample import TrainingSample
from transport.tensor import EncodedTensor


def to_samples(
    rollout: Rollout, *, advantage: float, run_id: str, group_id: str, trajectory_id: str
) -> list[TrainingSample]:
    """The rollout as the trainer wants it: sampled tokens are trained, all with the same advantage.

    Branches that train nothing give no sample; `step_index` counts the samples that remain.
    """
    trained = [(branch, mask) for branch in rollout.branches if (mask := _loss_mask(branch)).any()]
    return [
        TrainingSample(
            run_id=run_id,
            env_name=rollout.env_name,
            example_id=rollout.example_id,
            group_id=group_id,
            trajectory_id=trajectory_id,
            step_index=step_index,
            token_ids=EncodedTensor.of(branch.token_ids.astype(np.int32, copy=False)),
            loss_mask=EncodedTensor.of(mask),
            logprobs=EncodedTensor.of(branch.logprobs.astype(np.float32, copy=False)),
            advantages=advantage,
            temperature=rollout.temperature,
            reward=rollout.reward,
            versions=branch.versions,
        )
        for step_index, (branch, mask) in enumerate(trained)
    ]


def _loss_mask(branch: Branch) -> Bools:
    mask = branch.sampled.astype(np.bool_, copy=True)
    mask[:1] = False  # nothing predicts position 0
    return mask
