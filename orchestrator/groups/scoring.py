"""`score`: a final group becomes a `ScoredGroup`, by the `GroupRule` of its environment.

Guards stop a run that loses nearly everything (`FailureGuard`) or cannot learn (`SignalGuard`).
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from orchestrator.advantages import NamedAdvantage, compute_advantages, finish_batch, make_advantage
from orchestrator.config.envs import EnvConfig
from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.errors import EnginesLostError, FailureRateError, NoSignalError
from orchestrator.values.group import STALE, ZERO_SIGNAL, FinalGroup, ScoredGroup
from orchestrator.values.rollout import (
    PLAIN_RL,
    FailureReason,
    Rollout,
    RolloutFailure,
    TokenWeights,
    commonest_failure,
    token_weights,
)

ERROR_WINDOW = 200
"""Rollouts of one environment that are looked at: enough that a share of 0.9 is no accident, few enough that a run
which cannot work stops within minutes."""
MIN_GROUPS = 40
"""At `max_error_rate` 0.9, an environment that loses half its groups by bad luck is stopped once in 10^7 windows."""

_Failures = tuple[tuple[int, RolloutFailure], ...]
"""Failures of one group, each with its place in the group."""


class FailureGuard:
    """Looks at the last `window` rollouts of each environment, tries included but not those that were cancelled, and at
    its last groups: as many as have `window` rollouts, at least `MIN_GROUPS`.

    Both methods raise `FailureRateError`, or `EnginesLostError` if it is an engine's or a teacher's fault.
    """

    def __init__(self, max_error_rate: float, window: int = ERROR_WINDOW) -> None:
        self._max_error_rate = max_error_rate
        self._window = window
        self._rollouts: dict[str, deque[RolloutFailure | None]] = {}
        """`None`: it did not fail."""
        self._groups: dict[str, deque[_Failures | None]] = {}
        """`None`: failures did not cost the group."""

    def saw_try(self, env_name: str, failure: RolloutFailure) -> None:
        """A try failed and is made again."""
        if not _was_cancelled(failure):
            self._add_rollouts(env_name, [failure])

    def saw(self, scored: ScoredGroup) -> None:
        """Count a final group."""
        env_name, size = scored.env_name, scored.group.ticket.size
        failures = tuple((index, failure) for index, failure in scored.group.failures if not _was_cancelled(failure))
        outcomes = [None if isinstance(result, Rollout) else result for result in scored.group.results]
        self._add_rollouts(env_name, [one for one in outcomes if one is None or not _was_cancelled(one)])
        self._add_group(env_name, size, failures if scored.is_lost and failures else None)

    def _add_rollouts(self, env_name: str, outcomes: Sequence[RolloutFailure | None]) -> None:
        recent = self._rollouts.setdefault(env_name, deque(maxlen=self._window))
        recent.extend(outcomes)
        failures = [failure for failure in recent if failure is not None]
        if any(outcomes) and self._is_at_limit(len(failures), recent):
            self._stop(f"{len(failures)} of the last {len(recent)} rollouts of env {env_name!r} failed", failures)

    def _add_group(self, env_name: str, size: int, failures: _Failures | None) -> None:
        num_groups = max(self._window // size, MIN_GROUPS)
        recent = self._groups.setdefault(env_name, deque(maxlen=num_groups))
        recent.append(failures)
        lost = [failed for failed in recent if failed is not None]
        if failures and self._is_at_limit(len(lost), recent):
            what = f"{len(lost)} of the last {len(recent)} groups of env {env_name!r} were lost to failures"
            self._stop(what + _culprit(lost), [failure for _, failure in chain.from_iterable(lost)])

    def _is_at_limit(self, num_lost: int, recent: deque[RolloutFailure | None] | deque[_Failures | None]) -> bool:
        return len(recent) == recent.maxlen and num_lost >= self._max_error_rate * len(recent)

    def _stop(self, what: str, failures: Sequence[RolloutFailure]) -> None:
        commonest, count = commonest_failure(failures)
        text = f"{what}; the commonest error ({count}x) is {commonest.reason}: {commonest.message}"
        is_peer = commonest.reason in (FailureReason.ENGINE_ERROR, FailureReason.TEACHER_ERROR)
        raise EnginesLostError(text) if is_peer else FailureRateError(text)


def _was_cancelled(failure: RolloutFailure) -> bool:
    return failure.reason is FailureReason.CANCELLED


def _culprit(lost: Sequence[_Failures]) -> str:
    """Names the member that failed, if it was the same one in every lost group."""
    culprits = set.intersection(*({index for index, _ in failures} for failures in lost))
    return f": in each of them rollout #{min(culprits)} failed" if culprits else ""


class SignalGuard:
    """Stops a run whose groups never differ. Sees groups in the order in which they are put into batches: under `wait`
    it trips at the same one every time."""

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
            env_name, reward = group.env_name, group.group.survivors[0][1].reward
            raise NoSignalError(
                f"the last {self._in_a_row} groups had no signal (newest: env {env_name!r}, all rewards {reward:g}): "
                "the task is too easy or too hard for this model. Raise the temperature or group_size, choose easier "
                "or harder examples, or warm-start the model"
            )


@dataclass(frozen=True, slots=True)
class GroupRule:
    """One environment's rule. The default trains every survivor."""

    advantage: NamedAdvantage
    weights: TokenWeights = PLAIN_RL
    min_survivors: int = 1
    """A smaller rest of a group is dropped."""
    drops_partial: bool = False
    """Whether one failure costs the group."""


def group_rule(config: OrchestratorConfig, env: EnvConfig) -> GroupRule:
    """The rule that the config asks for. Raises `UserError` for a custom advantage function that is not there."""
    return GroupRule(
        advantage=make_advantage(config.advantage_of(env)),
        weights=token_weights(config.algorithm_of(env)),
        min_survivors=config.min_survivors_of(env),
        drops_partial=env.drops_groups,
    )


def group_rules(config: OrchestratorConfig) -> dict[str, GroupRule]:
    """The rule of every environment, by name."""
    return {env.label: group_rule(config, env) for env in config.envs}


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
    for env_name in {group.env_name for group in groups}:
        advantage = rules[env_name].advantage
        if advantage.over_batch is None:
            continue
        places = [
            place
            for place, group in enumerate(groups)
            if group.env_name == env_name and group.num_trainable and group.weights.rl
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
