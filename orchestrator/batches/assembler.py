"""`BatchAssembler`: dispatched groups, assembled into batches in the order that the staleness policy gives.

A group that brings nothing (filtered, dropped, stale) is passed over, and later ones move forward: that is the
backfill, and it can only make a group ship earlier.

`to_samples` makes the samples of a rollout: one per branch, with the weights that the algorithm gives its tokens.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from chat.trajectory import Bools, Branch, Floats
from orchestrator.batches.staleness_policy import Outlook, StalenessPolicy
from orchestrator.errors import InvariantError
from orchestrator.values.group import AssembledBatch, ScoredGroup, Ticket
from orchestrator.values.rollout import PLAIN_RL, Rollout, TokenWeights
from transport.wire.ledger import CompletedPositions
from transport.wire.sample import EncodedTensor, TrainingSample

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


Finish = Callable[[Sequence[ScoredGroup]], tuple[ScoredGroup, ...]]


class BatchAssembler:
    """Pure bookkeeping. `complete` holds batches that are complete and not yet shipped; `finish` sees the groups of
    each once, when it is complete, and gives them back in the same order.

    Invariant, for every order of finishing: each position that was dispatched is in exactly one complete batch, or in
    none yet.
    """

    def __init__(
        self, policy: StalenessPolicy, next_step: int, done: CompletedPositions, finish: Finish = tuple
    ) -> None:
        self.policy = policy
        self.next_step = next_step
        """The first batch that is not complete yet."""
        self.complete: deque[AssembledBatch] = deque()
        self.pending_rollouts = 0
        """The most rollouts that groups outside any complete batch can still bring."""
        self.pending_groups = 0
        """Groups outside any complete batch that can still bring rollouts."""
        self._finish = finish
        self._begin = done
        self._done = done
        self._tail = done.next_open(0)
        self._head = self._tail
        self._open: dict[int, Ticket] = {}
        self._final: dict[int, ScoredGroup] = {}
        self._taken: list[ScoredGroup] = []
        self._taken_rollouts = 0

    def __len__(self) -> int:
        """Groups that were dispatched and are in no complete batch."""
        return len(self._open) + len(self._final) + len(self._taken)

    @property
    def tail(self) -> int:
        """Position that is dispatched next."""
        return self._tail

    def outlook(self, live_version: int, free_slots: int) -> Outlook:
        """What `policy` admits the next group by."""
        return Outlook(self.next_step, self.pending_rollouts, self.pending_groups, live_version, free_slots)

    def dispatch(self, ticket: Ticket) -> None:
        """A group was dispatched; it must be the one at `tail`."""
        if ticket.seq != self._tail:
            raise InvariantError(f"group {ticket.key.id} has position {ticket.seq}, expected {self._tail}")
        self._tail = self._begin.next_open(self._tail + 1)
        self._open[ticket.seq] = ticket
        self.pending_rollouts += ticket.size
        self.pending_groups += 1

    def add_final(self, scored: ScoredGroup) -> list[ScoredGroup]:
        """A group is final. Returns the groups that are taken into batches because of it, in their order."""
        ticket = self._open.pop(scored.seq, None)
        if ticket is None:
            raise InvariantError(f"group {scored.id} at position {scored.seq} is final but is not awaited")
        scored = self.policy.checked(scored, self.next_step)
        self.pending_rollouts += scored.num_trainable - ticket.size
        self.pending_groups -= scored.num_trainable == 0
        self._final[scored.seq] = scored
        taken = []
        while (seq := self.policy.next_position(self._final, self._head)) is not None:
            taken.append(self._final.pop(seq))
            self._advance_head()
            self._take(taken[-1])
        return taken

    def _advance_head(self) -> None:
        while self._head != self._tail and self._head not in self._open and self._head not in self._final:
            self._head = self._begin.next_open(self._head + 1)

    def _take(self, scored: ScoredGroup) -> None:
        """The group goes into batch `next_step`, which is complete as soon as it is full."""
        self._taken.append(scored)
        self._taken_rollouts += scored.num_trainable
        if self._taken_rollouts >= self.policy.batch_size:
            self._complete_batch()

    def _complete_batch(self) -> None:
        self._done = self._done.add(group.seq for group in self._taken)
        batch = AssembledBatch(self.next_step, self._finish(self._taken), self._done)
        self.complete.append(batch)
        self.next_step += 1
        self.pending_rollouts -= self._taken_rollouts
        self.pending_groups -= len(batch.trained)
        self._taken, self._taken_rollouts = [], 0
