"""Configuration of the `rl` loss: one class per loss, told apart by `type`. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from runtime.config.config import Config


class DppoLossConfig(Config):
    """`dppo`: mask tokens whose probability moved too far in the direction the advantage pushes."""

    type: Literal["dppo"] = "dppo"
    """Mask tokens whose probability moved too far in the direction the advantage pushes."""
    delta_low: float = Field(0.2, ge=0)
    """Largest fall of probability that a negative advantage may still push down."""
    delta_high: float = Field(0.2, ge=0)
    """Largest rise of probability that a positive advantage may still push up."""
    kl_coef: float = Field(1e-3, ge=0)
    """Weight of the squared log ratio."""


class IpoLossConfig(Config):
    """`ipo`: mask tokens whose probability moved too far in either direction, whatever the advantage."""

    type: Literal["ipo"] = "ipo"
    """Mask tokens whose probability moved too far in either direction, whatever the advantage."""
    delta: float = Field(0.2, ge=0)
    """Largest change of probability that is still trained."""
    kl_coef: float = Field(1e-3, ge=0)
    """Weight of the squared log ratio."""


class PpoClipLossConfig(Config):
    """`ppo_clip`: the clipped surrogate with one limit."""

    type: Literal["ppo_clip"] = "ppo_clip"
    """The clipped surrogate with one limit."""
    epsilon: float = Field(0.2, gt=0, le=1)
    """Largest change of the ratio from 1."""


class GrpoClipHigherLossConfig(Config):
    """`grpo_clip_higher`: the clipped surrogate with more room upwards, which keeps rare tokens explorable."""

    type: Literal["grpo_clip_higher"] = "grpo_clip_higher"
    """The clipped surrogate with more room upwards, which keeps rare tokens explorable."""
    epsilon_low: float = Field(0.2, gt=0, le=1)
    """Largest fall of the ratio from 1."""
    epsilon_high: float = Field(0.28, gt=0)
    """Largest rise of the ratio from 1."""


class GspoLossConfig(Config):
    """`gspo`: the clipped surrogate on one ratio per sample, the geometric mean over its tokens."""

    type: Literal["gspo"] = "gspo"
    """The clipped surrogate on one ratio per sample, the geometric mean over its tokens."""
    epsilon_low: float = Field(3e-4, gt=0, le=1)
    """Largest fall of the sample's ratio from 1; the mean over many tokens moves little, so limits are small."""
    epsilon_high: float = Field(4e-4, gt=0)
    """Largest rise of the sample's ratio from 1."""


class CispoLossConfig(Config):
    """`cispo`: limit the weight of a token instead of dropping its gradient."""

    type: Literal["cispo"] = "cispo"
    """Limit the weight of a token instead of dropping its gradient."""
    epsilon_low: float = Field(1.0, gt=0, le=1)
    """The weight is never below 1 minus this; 1: no lower limit."""
    epsilon_high: float = Field(4.0, gt=0)
    """The weight is never above 1 plus this."""


class ReinforceLossConfig(Config):
    """`reinforce`: the plain policy gradient, for samples of the current policy only."""

    type: Literal["reinforce"] = "reinforce"
    """The plain policy gradient, for samples of the current policy only."""


class CustomLossConfig(Config):
    """`custom`: a function of your own; `trainer check-loss` tests it."""

    type: Literal["custom"] = "custom"
    """A function of your own; `trainer check-loss` tests it."""
    import_path: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function`, called as `function(inputs, **kwargs)` (`trainer/losses/protocol.py`)."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function."""


LossConfig = Annotated[
    DppoLossConfig
    | IpoLossConfig
    | PpoClipLossConfig
    | GrpoClipHigherLossConfig
    | GspoLossConfig
    | CispoLossConfig
    | ReinforceLossConfig
    | CustomLossConfig,
    Field(discriminator="type"),
]
