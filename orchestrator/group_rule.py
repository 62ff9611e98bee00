"""`GroupRule`: how the groups of one environment are judged: what a failure costs, advantages, weights of tokens."""

from dataclasses import dataclass

from orchestrator.advantages import NamedAdvantage, make_advantage
from orchestrator.algorithms.token_weights import PLAIN_RL, TokenWeights, token_weights
from orchestrator.config import EnvConfig, OrchestratorConfig


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
