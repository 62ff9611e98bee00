"""What keeps a final group out of a batch, and the guard that stops a run that cannot learn.

`score` turns a final group into a `ScoredGroup`; the guard sees these and raises when the run should stop.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.advantages import compute_advantages, finish_batch
from orchestrator.algorithms.token_weights import PLAIN_RL, TokenWeights
from orchestrator.errors import NoSignalError
from orchestrator.group_rule import GroupRule
from orchestrator.groups import LOST_GROUP, FinalGroup
from orchestrator.rollout import Rollout

ZERO_SIGNAL = "zero_signal"
"""Every advantage of the group is 0: it would add nothing to the gradient."""
STALE = "stale"
"""The group finished too late for the batch that was being filled (`staleness_policy = "drop"`)."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A final group, the advantages of its survivors, and why it will not be trained, if so."""

    group: FinalGroup
    advantages: tuple[float, ...]
    """One per survivor, in their order; empty if the group was dropped."""
    filtered: str | None
    weights: TokenWeights = PLAIN_RL
    """How much its tokens count in each part of the loss."""

    @property
    def is_lost(self) -> bool:
        """Whether failures cost the whole group."""
        return self.filtered in LOST_GROUP

    @property
    def num_trainable(self) -> int:
        """Rollouts that this group brings to a batch."""
        return 0 if self.filtered else len(self.advantages)

    @property
    def trainable(self) -> tuple[tuple[int, Rollout, float], ...]:
        """`(index, rollout, advantage)` of everything that is trained."""
        if self.filtered:
            return ()
        pairs = zip(self.group.survivors, self.advantages, strict=True)
        return tuple((index, rollout, advantage) for (index, rollout), advantage in pairs)


def score(group: FinalGroup, rule: GroupRule) -> ScoredGroup:
    """Compute advantages once, and apply the filters."""
    dropped = group.drop_reason(min_survivors=rule.min_survivors, drops_partial=rule.drops_partial)
    if dropped is not None:
        return ScoredGroup(group, (), dropped, rule.weights)
    rollouts = [rollout for _, rollout in group.survivors]
    if not rule.weights.rl:
        return ScoredGroup(group, (0.0,) * len(rollouts), None, rule.weights)
    advantages = compute_advantages(rule.advantage, group.ticket.key, rollouts)
    has_signal = any(advantages) or not rule.advantage.can_vanish or _learns_without(rule.weights, rollouts)
    return ScoredGroup(group, advantages, None if has_signal else ZERO_SIGNAL, rule.weights)


def normalise_batch(groups: Sequence[ScoredGroup], rules: Mapping[str, GroupRule]) -> tuple[ScoredGroup, ...]:
    """The groups of one batch after the second pass of their advantage functions, each environment by itself."""
    finished = list(groups)
    for env_name in {group.group.ticket.key.env_name for group in groups}:
        advantage = rules[env_name].advantage
        if advantage.over_batch is None:
            continue
        places = [
            place
            for place, group in enumerate(groups)
            if group.group.ticket.key.env_name == env_name and group.num_trainable and group.weights.rl
        ]
        values = [value for place in places for value in groups[place].advantages]
        rest = iter(finish_batch(advantage, env_name, values))
        for place in places:
            mine = tuple(itertools.islice(rest, groups[place].num_trainable))
            finished[place] = dataclasses.replace(groups[place], advantages=mine)
    return tuple(finished)


def _learns_without(weights: TokenWeights, rollouts: Sequence[Rollout]) -> bool:
    """Whether something is trained even where all advantages are 0."""
    if not weights.needs_advantage:
        return True
    return weights.observation > 0 and any(
        branch.observed is not None and branch.observed.any() for rollout in rollouts for branch in rollout.branches
    )


class SignalGuard:
    """Stops a run whose groups never differ. Sees groups as the line passes them: under `wait` it trips at the same one
    every time."""

    def __init__(self, max_zero_signal_groups: int) -> None:
        self._limit = max_zero_signal_groups
        self._in_a_row = 0

    def saw(self, group: ScoredGroup) -> None:
        """Raise `NoSignalError` at the limit. Groups lost to failures say nothing about the signal."""
        if group.filtered in (None, STALE):  # a stale one had a signal
            self._in_a_row = 0
        elif group.filtered == ZERO_SIGNAL:
            self._in_a_row += 1
        if self._in_a_row >= self._limit:
            env_name, reward = group.group.ticket.key.env_name, group.group.survivors[0][1].reward
            raise NoSignalError(
                f"the last {self._in_a_row} groups had no signal (newest: env {env_name!r}, all rewards {reward:g}): "
                "the task is too easy or too hard for this model. Raise the temperature or group_size, choose easier "
                "or harder examples, or warm-start the model"
            )
