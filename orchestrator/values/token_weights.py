"""`TokenWeights`: an algorithm as the trainer sees it: how much each kind of token counts in each part of the loss.

| algorithm           | who samples | sampled tokens       | tokens of the environment |
|---------------------|-------------|----------------------|---------------------------|
| `rl`                | policy      | `rl` 1               | -                         |
| `sft`               | teacher     | `ce` weight          | -                         |
| `opd`               | policy      | `ref_kl` weight      | -                         |
| any, `observation_weight` > 0     |  as above            | `ce` observation_weight   |
"""

from dataclasses import dataclass

from orchestrator.config.algorithm import AlgorithmConfig, OpdAlgorithmConfig, RlAlgorithmConfig, SftAlgorithmConfig


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Weights in the three parts of the loss. The default is plain reinforcement."""

    rl: float = 1.0
    """Sampled tokens: policy gradient."""
    ce: float = 0.0
    """Sampled tokens: cross-entropy."""
    ref_kl: float = 0.0
    """Sampled tokens: distance to the reference whose log probabilities the branch holds."""
    observation: float = 0.0
    """Tokens that the environment wrote between turns: cross-entropy."""

    @property
    def is_plain_rl(self) -> bool:
        """Whether every trained token has weight 1 in `rl`, and none elsewhere: what the trainer does unasked."""
        return self.rl == 1.0 and not (self.ce or self.ref_kl or self.observation)

    @property
    def imitates(self) -> bool:
        """Whether a teacher sampled the tokens: then it does not matter which version did, and how likely they were."""
        return self.ce > 0 and not self.rl and not self.ref_kl

    @property
    def needs_advantage(self) -> bool:
        """Whether sampled tokens teach nothing where the advantage is 0."""
        return not self.ce and not self.ref_kl


PLAIN_RL = TokenWeights()


def token_weights(config: AlgorithmConfig) -> TokenWeights:
    """The weights that the config asks for."""
    match config:
        case RlAlgorithmConfig():
            return TokenWeights(observation=config.observation_weight)
        case SftAlgorithmConfig():
            return TokenWeights(rl=0.0, ce=config.weight, observation=config.observation_weight)
        case OpdAlgorithmConfig():
            return TokenWeights(rl=config.rl_weight, ref_kl=config.weight, observation=config.observation_weight)
