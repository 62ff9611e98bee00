"""Configuration of the `rl` loss: one class per loss, told apart by `type`. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from runtime.config.config import Config
from runtime.config.keys import Advanced


class DppoLossConfig(Config):
    """`dppo`: mask tokens whose probability moved too far in the direction the advantage pushes."""

    type: Literal["dppo"] = "dppo"
    """`dppo`: mask tokens whose probability moved too far in the direction the advantage pushes."""
    delta_low: float = Field(0.2, ge=0)
    """`dppo`: largest fall of probability that a negative advantage may still push down."""
    delta_high: float = Field(0.2, ge=0)
    """`dppo`: largest rise of probability that a positive advantage may still push up."""
    kl_coef: float = Field(1e-3, ge=0)
    """`dppo`, `ipo`: weight of the squared log ratio, which keeps the policy near the one that sampled."""


class IpoLossConfig(Config):
    """`ipo`: mask tokens whose probability moved too far in either direction, whatever the advantage."""

    type: Literal["ipo"] = "ipo"
    """`ipo`: mask tokens whose probability moved too far in either direction, whatever the advantage."""
    delta: Advanced[float] = Field(0.2, ge=0)
    """`ipo`: largest change of probability that is still trained."""
    kl_coef: float = Field(1e-3, ge=0)
    """`dppo`, `ipo`: weight of the squared log ratio, which keeps the policy near the one that sampled."""


class PpoClipLossConfig(Config):
    """`ppo_clip`: the clipped surrogate with one limit."""

    type: Literal["ppo_clip"] = "ppo_clip"
    """`ppo_clip`: the clipped surrogate with one limit."""
    epsilon: float = Field(0.2, gt=0, le=1)
    """`ppo_clip`: largest change of the ratio from 1."""


class GrpoClipHigherLossConfig(Config):
    """`grpo_clip_higher`: the clipped surrogate with more room upwards, which keeps rare tokens explorable."""

    type: Literal["grpo_clip_higher"] = "grpo_clip_higher"
    """`grpo_clip_higher`: the clipped surrogate with more room upwards, which keeps rare tokens explorable."""
    epsilon_low: Advanced[float] = Field(0.2, gt=0, le=1)
    """`grpo_clip_higher`: largest fall of the ratio from 1."""
    epsilon_high: Advanced[float] = Field(0.28, gt=0)
    """`grpo_clip_higher`: largest rise of the ratio from 1."""


class GspoLossConfig(Config):
    """`gspo`: the clipped surrogate on one ratio per sample, the geometric mean over its tokens."""

    type: Literal["gspo"] = "gspo"
    """`gspo`: the clipped surrogate on one ratio per sample, the geometric mean over its tokens."""
    epsilon_low: Advanced[float] = Field(3e-4, gt=0, le=1)
    """`gspo`: largest fall of the sample's ratio from 1; a mean over many tokens moves little, so limits are small."""
    epsilon_high: Advanced[float] = Field(4e-4, gt=0)
    """`gspo`: largest rise of the sample's ratio from 1."""


class CispoLossConfig(Config):
    """`cispo`: limit the weight of a token instead of dropping its gradient."""

    type: Literal["cispo"] = "cispo"
    """`cispo`: limit the weight of a token instead of dropping its gradient."""
    epsilon_low: Advanced[float] = Field(1.0, gt=0, le=1)
    """`cispo`: the weight is never below 1 minus this; 1: no lower limit."""
    epsilon_high: Advanced[float] = Field(4.0, gt=0)
    """`cispo`: the weight is never above 1 plus this."""


class ReinforceLossConfig(Config):
    """`reinforce`: the plain policy gradient, for samples of the current policy only."""

    type: Literal["reinforce"] = "reinforce"
    """`reinforce`: the plain policy gradient, for samples of the current policy only."""


class CustomLossConfig(Config):
    """`custom`: a function of your own; `trainer check-loss` tests it."""

    type: Literal["custom"] = "custom"
    """`custom`: a function of your own; `trainer check-loss` tests it."""
    import_path: Advanced[str] = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function`, called as `function(inputs, **kwargs)` (`trainer/losses/protocol.py`)."""
    kwargs: Advanced[dict[str, JsonValue]] = Field(default_factory=dict)
    """Keyword arguments of the function in `import_path`."""


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
