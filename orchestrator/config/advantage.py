"""Configuration of the advantage function: one class per function, told apart by `type`."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from runtime.config.config import Config


class GrpoAdvantageConfig(Config):
    """`grpo`: reward minus the group's mean."""

    type: Literal["grpo"] = "grpo"
    """Tag."""
    normalize_std: bool = True
    """Also divide by the group's standard deviation."""


class DrGrpoAdvantageConfig(Config):
    """`dr_grpo`: reward minus the group's mean, and nothing else."""

    type: Literal["dr_grpo"] = "dr_grpo"
    """Tag."""


class RlooAdvantageConfig(Config):
    """`rloo`: reward minus the mean of the others."""

    type: Literal["rloo"] = "rloo"
    """Tag."""


class MaxRlAdvantageConfig(Config):
    """`maxrl`: reward minus the group's mean, divided by that mean: rare successes count more."""

    type: Literal["maxrl"] = "maxrl"
    """Tag."""


class ReinforcePpAdvantageConfig(Config):
    """`reinforce_pp`: normalised over the batch instead of the group."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    """Tag."""
    group_baseline: bool = True
    """Subtract the group's mean first; false: only the batch's mean is subtracted, and groups of one are trained."""


class PpoAdvantageConfig(Config):
    """`ppo`: the reward as it is; the trainer's critic makes the advantages."""

    type: Literal["ppo"] = "ppo"
    """Tag."""


class CustomAdvantageConfig(Config):
    """`custom`: a function of your own."""

    type: Literal["custom"] = "custom"
    """Tag."""
    import_path: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function`, called once per group as `function(AdvantageInputs(...), **kwargs)`."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function."""


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
