"""From config to loss."""

from collections.abc import Callable
from functools import partial

from trainer.losses import policy
from trainer.losses.config import CustomLossConfig, LossConfig
from trainer.losses.custom import load_custom_loss
from trainer.losses.protocol import RlLoss, RlOutputs


def make_loss(config: LossConfig) -> RlLoss:
    """The `rl` loss that the config asks for. Raises `LossInvalid` for a custom one that cannot be found."""
    if isinstance(config, CustomLossConfig):
        return load_custom_loss(config.import_path, config.kwargs)
    function: Callable[..., RlOutputs] = getattr(policy, config.type)
    return partial(function, **config.model_dump(exclude={"type"}))
