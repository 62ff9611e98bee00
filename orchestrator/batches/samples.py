"""Rollout to `TrainingSample`s: one per branch, with the weights that the algorithm gives its tokens."""

import numpy as np

from chat.branch import Bools, Branch, Floats
from orchestrator.values.rollout import Rollout
from orchestrator.values.token_weights import PLAIN_RL, TokenWeights
from transport.wire.sample import TrainingSample
from transport.wire.tensor import EncodedTensor

NEUTRAL_TEMPERATURE = 1.0


def to_samples(
    rollout: Rollout,
    *,
    advantage: float,
    run_id: str,
    group_id: str,
    trajectory_id: str,
    weights: TokenWeights = PLAIN_RL,
) -> list[TrainingSample]:
    """The rollout as the trainer wants it: sampled tokens are trained, all with the same advantage.

    Branches that train nothing give no sample; `step_index` counts the samples that remain.
    """
    trained = [(branch, mask) for branch in rollout.branches if (mask := _loss_mask(branch, weights)).any()]
    samples = []
    for step_index, (branch, mask) in enumerate(trained):
        streams = _streams(branch, mask, weights)
        samples.append(
            TrainingSample(
                run_id=run_id,
                env_name=rollout.env_name,
                example_id=rollout.example_id,
                group_id=group_id,
                trajectory_id=trajectory_id,
                step_index=step_index,
                token_ids=EncodedTensor.of(branch.token_ids.astype(np.int32, copy=False)),
                loss_mask=EncodedTensor.of(mask),
                logprobs=EncodedTensor.of(_behaviour_logprobs(branch, weights)),
                advantages=advantage,
                # What others wrote is imitated as it is, at whatever temperature they wrote it.
                temperature=NEUTRAL_TEMPERATURE if weights.imitates else rollout.temperature,
                reward=rollout.reward,
                versions=branch.versions,
                ref_logprobs=streams.get("ref_logprobs"),
                rl_weights=streams.get("rl_weights"),
                ce_weights=streams.get("ce_weights"),
                ref_kl_weights=streams.get("ref_kl_weights"),
                mm_kwargs={} if branch.images is None else branch.images.mm_kwargs,
                mm_token_type_ids=None if branch.token_types is None else EncodedTensor.of(branch.token_types),
            )
        )
    return samples


def _loss_mask(branch: Branch, weights: TokenWeights) -> Bools:
    mask = branch.sampled.astype(np.bool_, copy=True)
    if weights.observation and branch.observed is not None:
        mask |= branch.observed
    mask[:1] = False  # nothing predicts position 0
    return mask


def _behaviour_logprobs(branch: Branch, weights: TokenWeights) -> Floats:
    if weights.imitates:
        return np.zeros(len(branch.token_ids), np.float32)
    return branch.logprobs.astype(np.float32, copy=False)


def _streams(branch: Branch, mask: Bools, weights: TokenWeights) -> dict[str, EncodedTensor]:
    """Weight streams, and the teacher's log probabilities; nothing where every trained token is plain `rl`, which is
    known at once for most runs."""
    if weights.is_plain_rl:
        return {}
    sampled = branch.sampled & mask
    observed = mask & ~sampled
    ce = weights.ce * sampled + weights.observation * observed
    streams: dict[str, Floats] = {}
    if weights.rl != 1.0 or observed.any():
        streams["rl_weights"] = weights.rl * sampled
    if ce.any():
        streams["ce_weights"] = ce
    if weights.ref_kl and branch.ref_logprobs is not None:
        streams["ref_kl_weights"] = weights.ref_kl * sampled
        streams["ref_logprobs"] = np.where(sampled, branch.ref_logprobs, 0.0)
    return {name: EncodedTensor.of(stream.astype(np.float32)) for name, stream in streams.items()}
