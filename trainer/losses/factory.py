"""From the config to the `rl` loss: a built-in one by name, or the user's own by its import path."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from pydantic import JsonValue
from torch import Tensor

from runtime.base.imported import load_function
from runtime.errors import UserError
from trainer.config.loss import CustomLossConfig, LossConfig
from trainer.errors import LossInvalid
from trainer.losses import builtin
from trainer.losses.protocol import RlInputs, RlLoss, RlOutputs

LossFunction = Callable[..., RlOutputs]
"""`function(inputs: RlInputs, **kwargs) -> RlOutputs`."""


@dataclass(frozen=True)
class CustomLoss:
    """Calls `function(inputs, **kwargs)` and raises `LossInvalid` for outputs of another shape or type."""

    name: str
    function: LossFunction
    kwargs: Mapping[str, JsonValue] = field(default_factory=dict)

    def __call__(self, inputs: RlInputs) -> RlOutputs:
        outputs = self.function(inputs, **self.kwargs)
        if not isinstance(outputs, RlOutputs):
            raise LossInvalid(f"{self.name} must return RlOutputs, got {type(outputs).__name__}")
        self._check("losses", outputs.losses, inputs.logprobs)
        for name in ("is_masked_high", "is_masked_low"):
            self._check(name, getattr(outputs, name), inputs.members)
        return outputs

    def _check(self, name: str, values: Tensor, like: Tensor) -> None:
        expected, got = _describe(like), _describe(values)
        if got != expected:
            raise LossInvalid(f"{name} of {self.name} must be {expected}, one entry per trained token, got {got}")


def load_custom_loss(import_path: str, kwargs: Mapping[str, JsonValue]) -> CustomLoss:
    """The function at `package.module:name`. Raises `LossInvalid`, which says what is wrong with it."""
    try:
        return CustomLoss(import_path, load_function(import_path, kwargs, section="loss"), kwargs)
    except UserError as error:
        raise LossInvalid(str(error)) from error


def _describe(values: object) -> str:
    if not isinstance(values, torch.Tensor):
        return type(values).__name__
    return f"{str(values.dtype).removeprefix('torch.')}{list(values.shape)}"


def make_loss(config: LossConfig) -> RlLoss:
    """The `rl` loss that the config asks for. Raises `LossInvalid` for a custom one that cannot be found."""
    if isinstance(config, CustomLossConfig):
        return load_custom_loss(config.import_path, config.kwargs)
    function: Callable[..., RlOutputs] = getattr(builtin, config.type)
    return partial(function, **config.model_dump(exclude={"type"}))
