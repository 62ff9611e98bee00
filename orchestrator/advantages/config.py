"""Configuration of the advantage function: one class per function, told apart by `type`."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from runtime.config import Config


class AdvantageConfigBase(Config):
    """What the rules of the orchestrator's config ask of every advantage function."""

    @property
    def needs_siblings(self) -> bool:
        """Whether a rollout is compared with others of its group, so that groups of one teach nothing."""
        return True

    @property
    def min_survivors(self) -> int:
        """The fewest rollouts of a group that the function is defined for."""
        return 1


class GrpoAdvantageConfig(AdvantageConfigBase):
    """`grpo`: reward minus the group's mean."""

    type: Literal["grpo"] = "grpo"
    """Tag."""
    normalize_std: bool = True
    """Also divide by the group's standard deviation."""


class DrGrpoAdvantageConfig(AdvantageConfigBase):
    """`dr_grpo`: reward minus the group's mean, and nothing else."""

    type: Literal["dr_grpo"] = "dr_grpo"
    """Tag."""


class RlooAdvantageConfig(AdvantageConfigBase):
    """`rloo`: reward minus the mean of the others."""

    type: Literal["rloo"] = "rloo"
    """Tag."""

    @property
    def min_survivors(self) -> int:
        """There must be another one."""
        return 2


class MaxRlAdvantageConfig(AdvantageConfigBase):
    """`maxrl`: reward minus the group's mean, divided by that mean: rare successes count more."""

    type: Literal["maxrl"] = "maxrl"
    """Tag."""


class ReinforcePpAdvantageConfig(AdvantageConfigBase):
    """`reinforce_pp`: normalised over the batch instead of the group."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    """Tag."""
    group_baseline: bool = True
    """Subtract the group's mean first; false: only the batch's mean is subtracted, and groups of one are trained."""

    @property
    def needs_siblings(self) -> bool:
        """Only for the group's mean."""
        return self.group_baseline


class PpoAdvantageConfig(AdvantageConfigBase):
    """`ppo`: the reward as it is; the trainer's critic makes the advantages."""

    type: Literal["ppo"] = "ppo"
    """Tag."""

    @property
    def needs_siblings(self) -> bool:
        """The baseline is the critic's."""
        return False


class CustomAdvantageConfig(AdvantageConfigBase):
    """`custom`: a function of your own."""

    type: Literal["custom"] = "custom"
    """Tag."""
    import_path: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function`, called once per group as `function(AdvantageInputs(...), **kwargs)`."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @property
    def needs_siblings(self) -> bool:
        """Unknown: the function must accept any size."""
        return False


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
