"""Advantage functions of a user, found by import path."""

from orchestrator.advantages import AdvantageInputs, AdvantageOutputs

NOT_A_FUNCTION = 3


def ranks(inputs: AdvantageInputs, *, scale: float = 1.0) -> AdvantageOutputs:
    """How many of the group are worse."""
    rewards = [rollout.reward for rollout in inputs.rollouts]
    return AdvantageOutputs([scale * sum(other < reward for other in rewards) for reward in rewards])


def raises(inputs: AdvantageInputs) -> AdvantageOutputs:
    """A bug of the user's."""
    raise KeyError("judge")


def returns_a_list(inputs: AdvantageInputs) -> list[float]:
    """Forgets to wrap its result."""
    return [0.0] * len(inputs.rollouts)
