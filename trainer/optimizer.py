"""AdamW, with its state made at once instead of at the first step.

An optimizer whose moments exist from the start has the same shape before and after any step, so a checkpoint is saved
and loaded in place, parameter by parameter, without special cases.
"""

import torch
from torch import Tensor, nn

from trainer.config import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters of `model`, moments zero."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trainable, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    for parameter in trainable:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` for the next step."""
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
