"""From config to loss."""

from typing import assert_never

from trainer.losses.cispo import CispoLoss
from trainer.losses.clip import ClipLoss, GspoLoss
from trainer.losses.config import (
    CispoLossConfig,
    CustomLossConfig,
    DppoLossConfig,
    GrpoClipHigherLossConfig,
    GspoLossConfig,
    IpoLossConfig,
    LossConfig,
    PpoClipLossConfig,
    ReinforceLossConfig,
)
from trainer.losses.custom import load_custom_loss
from trainer.losses.dppo import DppoLoss, IpoLoss
from trainer.losses.protocol import RlLoss
from trainer.losses.reinforce import ReinforceLoss


def make_loss(config: LossConfig) -> RlLoss:
    """The `rl` loss that the config asks for. Raises `LossInvalid` for a custom one that cannot be found."""
    match config:
        case DppoLossConfig():
            return DppoLoss(config.delta_low, config.delta_high, config.kl_coef)
        case IpoLossConfig():
            return IpoLoss(config.delta, config.kl_coef)
        case PpoClipLossConfig():
            return ClipLoss(config.epsilon, config.epsilon)
        case GrpoClipHigherLossConfig():
            return ClipLoss(config.epsilon_low, config.epsilon_high)
        case GspoLossConfig():
            return GspoLoss(config.epsilon_low, config.epsilon_high)
        case CispoLossConfig():
            return CispoLoss(config.epsilon_low, config.epsilon_high)
        case ReinforceLossConfig():
            return ReinforceLoss()
        case CustomLossConfig():
            return load_custom_loss(config.import_path, config.kwargs)
        case _:
            assert_never(config)
