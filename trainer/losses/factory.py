"""From config to loss."""

from trainer.config import LossConfig
from trainer.losses.dppo import DppoLoss
from trainer.losses.protocol import RlLoss


def make_loss(config: LossConfig) -> RlLoss:
    """The `rl` loss that the config asks for."""
    return DppoLoss(config.delta_low, config.delta_high, config.kl_coef)
