"""`reinforce`: the plain policy gradient. Right on policy only: it does not correct for the age of a sample."""

from dataclasses import dataclass

import torch

from trainer.losses.protocol import RlInputs, RlOutputs


@dataclass(frozen=True)
class ReinforceLoss:
    """-advantage x log probability; nothing is masked."""

    def __call__(self, inputs: RlInputs) -> RlOutputs:
        """Loss of each token."""
        nothing = torch.zeros_like(inputs.members)
        return RlOutputs(-inputs.advantages * inputs.logprobs, nothing, nothing)
