"""`cispo`: the weight of a token is limited, never its gradient: even a token that moved far goes on learning."""

from dataclasses import dataclass

from trainer.losses.protocol import RlInputs, RlOutputs


@dataclass(frozen=True)
class CispoLoss:
    """-advantage x clip(ratio, without gradient) x log probability. The mask says where the weight was held."""

    epsilon_low: float
    epsilon_high: float

    def __call__(self, inputs: RlInputs) -> RlOutputs:
        """Loss of each token."""
        ratio = inputs.ratio.detach()
        low, high = 1 - self.epsilon_low, 1 + self.epsilon_high
        losses = -inputs.advantages * ratio.clamp(low, high) * inputs.logprobs
        return RlOutputs(losses, ratio > high, ratio < low)
