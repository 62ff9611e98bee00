"""`estimate_values`: values of a batch before its first optimizer step, and its samples with the advantages they give.

    pack ─▶ values of own tokens (no gradient) ─▶ sum over ranks: every rank has all ─▶ GAE ─▶ samples, value targets

A trajectory may be spread over ranks, so ranks exchange values: a few bytes per trained token. From then on a critic's
advantages are the samples' own, and nothing downstream knows the difference.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.accounting import ALL
from trainer.arrays import FloatArray, IntArray
from trainer.critic.credit import ACTION, NO_ACTION, STEP_START, Credit, CreditInputs, assign_credit
from trainer.critic.critic import CriticLearner
from trainer.errors import CriticMismatch
from trainer.model.fsdp import reshard
from trainer.model.policy import Policy
from trainer.planning.pack import MicroBatch
from trainer.ranks import sum_over_ranks
from transport.wire.manifest import BatchManifest
from transport.wire.sample import EncodedTensor, TrainingSample


@dataclass(frozen=True)
class ValueTargets:
    """One entry per trained token of a micro batch."""

    old_values: Tensor
    """float32[L]: what the critic said before the first optimizer step."""
    returns: Tensor
    """float32[L]."""
    members: Tensor
    """bool[L]: tokens whose value is trained."""

    def to(self, device: torch.device) -> "ValueTargets":
        return ValueTargets(self.old_values.to(device), self.returns.to(device), self.members.to(device))


@dataclass(frozen=True)
class BatchValues:
    """Credit for a batch. `offsets[row]` is where the loss tokens of a row begin."""

    values: FloatArray
    credit: Credit
    offsets: IntArray
    token_envs: IntArray
    env_names: tuple[str, ...]

    def targets(self, batch: MicroBatch) -> ValueTargets:
        """The targets of a micro batch that is on the host."""
        slots = token_slots(batch, self.offsets)
        old_values, returns = (column[slots].astype(np.float32) for column in (self.values, self.credit.returns))
        members = torch.from_numpy(self.credit.is_target[slots])
        return ValueTargets(torch.from_numpy(old_values), torch.from_numpy(returns), members)

    def with_advantages(self, samples: Mapping[int, TrainingSample]) -> dict[int, TrainingSample]:
        """`samples` by row, with the advantages of their tokens."""
        return {row: self._with_advantage(row, sample) for row, sample in samples.items()}

    def metrics(self) -> dict[str, float]:
        """`explained_variance/{all|env}`: 1 for a perfect critic, 0 for a constant one; left out if no return
        differs."""
        chosen = {ALL: self.credit.is_target}
        chosen |= {name: chosen[ALL] & (self.token_envs == env) for env, name in enumerate(self.env_names)}
        shares = {name: explained_variance(self.values[own], self.credit.returns[own]) for name, own in chosen.items()}
        return {f"explained_variance/{name}": share for name, share in shares.items() if share is not None}

    def _with_advantage(self, row: int, sample: TrainingSample) -> TrainingSample:
        mask = sample.loss_mask.numpy()
        advantages = np.zeros(sample.num_tokens, dtype=np.float32)
        start = self.offsets[row]
        advantages[mask] = self.credit.advantages[start : start + np.count_nonzero(mask)]
        return msgspec.structs.replace(sample, advantages=EncodedTensor.of(advantages))


def explained_variance(values: FloatArray, returns: FloatArray) -> float | None:
    """Share of the variance of `returns` that `values` explain; `None` if there is none."""
    spread = float(returns.var()) if returns.size else 0.0
    return 1.0 - float((returns - values).var()) / spread if spread > 0 else None


def estimate_values(
    learner: CriticLearner,
    policy: Policy,
    manifest: BatchManifest,
    micro_batches: Iterable[MicroBatch],
    samples: Mapping[int, TrainingSample],
) -> BatchValues:
    """Credit for the batch, the same on every rank, from all micro batches and samples of each. Collective.

    Raises `CriticMismatch` for a batch that was not made for a critic.
    """
    loss_tokens = manifest.columns.loss_tokens.numpy().astype(np.int64)
    offsets = np.cumsum(loss_tokens) - loss_tokens
    token_rows = np.repeat(np.arange(len(loss_tokens)), loss_tokens)
    tokens, rows = np.zeros((2, len(token_rows))), np.zeros((3, len(loss_tokens)))
    for batch in micro_batches:
        tokens[:, token_slots(batch, offsets)] = _estimate(learner, policy, batch), token_roles(batch)
    reshard(policy)
    reshard(learner.critic)
    for row, sample in samples.items():
        rows[:, row] = sample.reward, sample.step_index, not is_rewarded(sample)
    _exchange(tokens, rows)
    check_advantages(rows[2], manifest)
    batch_values = CreditInputs(
        trajectories=manifest.columns.trajectories.numpy().astype(np.int64),
        step_indices=rows[1].astype(np.int64),
        rewards=rows[0],
        token_rows=token_rows,
        values=tokens[0],
        roles=tokens[1].astype(np.int8),
    )
    check_episodes(batch_values, manifest.step)
    env_ids = manifest.columns.env_ids.numpy().astype(np.int64)
    credit = assign_credit(batch_values, learner.config)
    return BatchValues(tokens[0], credit, offsets, env_ids[token_rows], manifest.env_names)


def token_slots(batch: MicroBatch, offsets: IntArray) -> IntArray:
    """Place of each trained token of a micro batch among the loss tokens of the whole batch."""
    segments = batch.loss_tokens.segments.numpy()
    place_in_sample = np.arange(len(segments)) - np.searchsorted(segments, segments)
    rows = np.array(batch.sample_rows, dtype=np.int64)[segments]
    slots: IntArray = offsets[rows] + place_in_sample
    return slots


def token_roles(batch: MicroBatch) -> npt.NDArray[np.int8]:
    """Role of each trained token: a step goes on as long as `rl` tokens of a sample follow each other."""
    tokens = batch.loss_tokens
    if tokens.rl_weights is None:
        return np.full(batch.num_loss_tokens, NO_ACTION, dtype=np.int8)
    is_action = tokens.rl_weights.numpy() != 0
    index, segments = tokens.index.numpy(), tokens.segments.numpy()
    goes_on = np.zeros_like(is_action)
    goes_on[1:] = is_action[:-1] & (index[1:] == index[:-1] + 1) & (segments[1:] == segments[:-1])
    return np.where(is_action, np.where(goes_on, ACTION, STEP_START), NO_ACTION).astype(np.int8)


def is_rewarded(sample: TrainingSample) -> bool:
    """Whether the advantage is the reward itself: anything else already has a baseline. True without `rl` tokens."""
    if sample.rl_weights is not None and not sample.rl_weights.numpy().any():
        return True
    return not isinstance(sample.advantages, EncodedTensor) and sample.advantages == sample.reward


def check_advantages(has_baseline: FloatArray, manifest: BatchManifest) -> None:
    """Raise if any row has an advantage that is not its reward; on every rank, because all know all rows."""
    if not has_baseline.any():
        return
    row = int(np.argmax(has_baseline))
    env_name = manifest.env_names[int(manifest.columns.env_ids.numpy()[row])]
    raise CriticMismatch(
        f"row {row} of batch {manifest.step} (env {env_name!r}) comes with an advantage that is not its reward, but "
        "the trainer has a critic: set the orchestrator's advantage.type to 'ppo', or remove the trainer's `critic`"
    )


def check_episodes(batch: CreditInputs, step: int) -> None:
    """Raise unless there is an action, and every trajectory has one reward."""
    if not batch.roles.any():
        raise CriticMismatch(f"batch {step} has no `rl` token, so a critic has nothing to value: remove `critic`")
    rows = np.unique(batch.token_rows[batch.roles != NO_ACTION])
    order = rows[np.argsort(batch.trajectories[rows], kind="stable")]
    trajectories, rewards = batch.trajectories[order], batch.rewards[order]
    differs = (trajectories[1:] == trajectories[:-1]) & (rewards[1:] != rewards[:-1])
    if differs.any():
        row = int(order[1:][differs][0])
        raise CriticMismatch(f"row {row} of batch {step} has another reward than the rest of its trajectory")


@torch.no_grad()
def _estimate(learner: CriticLearner, policy: Policy, batch: MicroBatch) -> FloatArray:
    device = next(policy.parameters()).device
    values: FloatArray = learner.critic.estimate(policy, batch.to(device)).double().cpu().numpy()
    return values


def _exchange(*tables: FloatArray) -> None:
    """Fill in what other ranks know, in place: a number that this rank does not know is 0 here."""
    flat = sum_over_ranks(torch.from_numpy(np.concatenate([table.ravel() for table in tables])))
    start = 0
    for table in tables:
        table[...] = flat[start : start + table.size].numpy().reshape(table.shape)
        start += table.size
