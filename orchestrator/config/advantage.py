"""Configuration of the advantage function: one class per function, told apart by `type`."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from runtime.config.config import Config
from runtime.config.keys import Advanced


class GrpoAdvantageConfig(Config):
    """`grpo`: reward minus the group's mean."""

    type: Literal["grpo"] = "grpo"
    """`grpo`: reward minus the group's mean, divided by the group's standard deviation."""
    normalize_std: bool = True
    """`grpo`: also divide by the group's standard deviation."""


class DrGrpoAdvantageConfig(Config):
    """`dr_grpo`: reward minus the group's mean, and nothing else."""

    type: Literal["dr_grpo"] = "dr_grpo"
    """`dr_grpo`: reward minus the group's mean, and nothing else."""


class RlooAdvantageConfig(Config):
    """`rloo`: reward minus the mean of the others."""

    type: Literal["rloo"] = "rloo"
    """`rloo`: reward minus the mean of the others."""


class MaxRlAdvantageConfig(Config):
    """`maxrl`: reward minus the group's mean, divided by that mean: rare successes count more."""

    type: Literal["maxrl"] = "maxrl"
    """`maxrl`: reward minus the group's mean, divided by that mean."""


class ReinforcePpAdvantageConfig(Config):
    """`reinforce_pp`: normalised over the batch instead of the group."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    """`reinforce_pp`: normalised over the batch instead of the group."""
    group_baseline: Advanced[bool] = True
    """`reinforce_pp`: subtract the group's mean first; false: only the batch's mean is subtracted, and groups of one
    are trained."""


class PpoAdvantageConfig(Config):
    """`ppo`: the reward as it is; the trainer's critic makes the advantages."""

    type: Literal["ppo"] = "ppo"
    """`ppo`: the reward as it is; the trainer's critic makes the advantages."""


class CustomAdvantageConfig(Config):
    """`custom`: a function of your own."""

    type: Literal["custom"] = "custom"
    """`custom`: a function of your own (`import_path`)."""
    import_path: Advanced[str] = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function`, called once per group as `function(AdvantageInputs(...), **kwargs)`."""
    kwargs: Advanced[dict[str, JsonValue]] = Field(default_factory=dict)
    """Keyword arguments of the function in `import_path`."""


AdvantageConfig = Annotated[
    GrpoAdvantageConfig
    | DrGrpoAdvantageConfig
    | RlooAdvantageConfig
    | MaxRlAdvantageConfig
    | ReinforcePpAdvantageConfig
    | PpoAdvantageConfig
    | CustomAdvantageConfig,
    Field(discriminator="type"),
]


def needs_siblings(advantage: AdvantageConfig) -> bool:
    """Whether a rollout is compared with others of its group, so that groups of one teach nothing. `ppo` has the
    critic's baseline; a custom function must accept any size."""
    if isinstance(advantage, ReinforcePpAdvantageConfig):
        return advantage.group_baseline
    return not isinstance(advantage, PpoAdvantageConfig | CustomAdvantageConfig)


def min_survivors(advantage: AdvantageConfig) -> int:
    """The fewest rollouts of a group that the function is defined for."""
    return 2 if isinstance(advantage, RlooAdvantageConfig) else 1
