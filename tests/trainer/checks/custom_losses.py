"""Losses as a user might write them: one that keeps every promise, and one for each way of breaking one."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from trainer.losses.protocol import RlInputs, RlOutputs


def good(inputs: RlInputs, *, scale: float = 1.0) -> RlOutputs:
    return _outputs(inputs, -inputs.advantages * inputs.ratio * scale)


def normalised_by_its_own_length(inputs: RlInputs) -> RlOutputs:
    return _outputs(inputs, -inputs.advantages * inputs.logprobs / len(inputs.logprobs))


def whitened_over_the_row(inputs: RlInputs) -> RlOutputs:
    centred = inputs.advantages - inputs.advantages.mean()
    return _outputs(inputs, -centred * inputs.logprobs)


def first_sample_only(inputs: RlInputs) -> RlOutputs:
    return _outputs(inputs, -inputs.advantages * inputs.logprobs * (inputs.segments == 0))


def unbounded(inputs: RlInputs) -> RlOutputs:
    return _outputs(inputs, -inputs.advantages * (10 * inputs.log_ratio).exp())


def sees_strangers(inputs: RlInputs) -> RlOutputs:
    everybody = replace(inputs, members=torch.ones_like(inputs.members))
    return _outputs(inputs, -inputs.advantages * inputs.logprobs * everybody.segment_mean(inputs.behaviour_logprobs))


def changes_its_inputs(inputs: RlInputs) -> RlOutputs:
    inputs.advantages.mul_(2.0)
    return good(inputs)


def draws_lots(inputs: RlInputs) -> RlOutputs:
    return _outputs(inputs, -inputs.advantages * inputs.logprobs * torch.rand_like(inputs.logprobs))


def without_gradient(inputs: RlInputs) -> RlOutputs:
    return _outputs(inputs, -inputs.advantages * inputs.logprobs.detach())


def one_number(inputs: RlInputs) -> RlOutputs:
    return _outputs(inputs, (-inputs.advantages * inputs.logprobs).mean())


def raises(inputs: RlInputs) -> RlOutputs:
    raise KeyError("no such thing")


BROKEN: dict[Callable[[RlInputs], RlOutputs], str] = {
    normalised_by_its_own_length: "packing",
    whitened_over_the_row: "packing",
    first_sample_only: "order",
    unbounded: "finite",
    sees_strangers: "members",
    changes_its_inputs: "pure",
    draws_lots: "pure",
    without_gradient: "shape",
    one_number: "shape",
    raises: "shape",
}
"""The promise that each of them breaks, among others."""


def _outputs(inputs: RlInputs, losses: Tensor) -> RlOutputs:
    nothing = torch.zeros_like(inputs.members)
    return RlOutputs(losses, nothing, nothing)
