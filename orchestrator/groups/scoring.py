"""`score`: a final group becomes a `ScoredGroup`, by the `GroupRule` of its environment."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.advantages import NamedAdvantage, compute_advantages, finish_batch, make_advantage
from orchestrator.config.envs import EnvConfig
from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.values.group import ZERO_SIGNAL, FinalGroup, ScoredGroup
from orchestrator.values.rollout import Rollout
from orchestrator.values.token_weights import PLAIN_RL, TokenWeights, token_weights


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
