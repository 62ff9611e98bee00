"""AdamW, or Muon beside it, with state made at once instead of at the first step.

An optimizer whose moments exist from the start has the same shape before and after any step, so a checkpoint is saved
and loaded in place, parameter by parameter, without special cases.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from runtime.errors import UserError
from trainer.config.model import OptimizerConfig, ScheduleConfig
from trainer.errors import ModelUnusable


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """An optimizer of the trainable parameters of `model`, moments zero. Raises `UserError` if it cannot be."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.type == "adamw":
        return _adamw(trainable, config)
    matrices = layer_matrices(model)
    chosen = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in trainable if id(parameter) not in chosen]
    return OptimizerPair(_muon(matrices, config), _adamw(rest, config))


class OptimizerPair(torch.optim.Optimizer):
    """Two optimizers of different parameters that step as one. Groups and state are theirs, not copies."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        super().__init__([*first.param_groups, *second.param_groups], {})
        self._parts = first, second
        self.param_groups = [*first.param_groups, *second.param_groups]
        self.state.update(first.state)
        self.state.update(second.state)

    def step(self) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


def layer_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters of two dimensions within the layers of `model`."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    matrices = [parameter for layer in layers for parameter in layer.parameters() if parameter.ndim == 2]
    if not matrices:
        raise ModelUnusable(f"optimizer.type = 'muon' finds no layers with matrices in {type(model).__name__}")
    if any(isinstance(parameter, DTensor) for parameter in matrices):
        raise UserError(
            "optimizer.type = 'muon' needs whole matrices, and several ranks shard them: use one rank, or 'adamw'"
        )
    return [parameter for parameter in matrices if parameter.requires_grad]


def _adamw(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(
        parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def _muon(matrices: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.Muon:
    optimizer = torch.optim.Muon(
        matrices,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    for parameter in matrices:
        optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def current_learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The rate of the last, or next, step."""
    return float(optimizer.param_groups[0]["lr"])


def named_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's own tensors (not copies) by `<parameter>.<state>`."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
    }


def learning_rate(step: int, peak: float, schedule: ScheduleConfig, max_steps: int | None) -> float:
    """The rate that step `step` (from 1) is taken with.

    Step `k` of the warm-up uses `k / (warmup_steps + 1)` of the peak; a decaying schedule reaches
    `min_lr_ratio * peak` at `max_steps` and stays there.
    """
    if step <= schedule.warmup_steps:
        return peak * step / (schedule.warmup_steps + 1)
    return peak * _decay(step, schedule, max_steps)


def _decay(step: int, schedule: ScheduleConfig, max_steps: int | None) -> float:
    if schedule.type == "constant":
        return 1.0
    assert max_steps is not None, "the config asks for it"
    span = max(max_steps - schedule.warmup_steps - 1, 1)
    passed = min((step - schedule.warmup_steps - 1) / span, 1.0)
    share = 1.0 - passed if schedule.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * passed))
    return schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * share
