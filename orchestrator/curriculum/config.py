"""Config of `envs[].curriculum`."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from runtime.config.config import Config


class NoCurriculumConfig(Config):
    """`none`: every example once per epoch, in an order drawn anew for every epoch."""

    type: Literal["none"] = "none"
    """Tag."""


class ActiveCurriculumConfig(Config):
    """What all curricula have."""

    refresh_groups: int = Field(128, gt=0)
    """Groups of the environment in one round: examples are drawn for a whole round, from what was seen up to the end of
    the round before the last one."""
    memory: float = Field(0.5, ge=0, le=1)
    """Weight of an example's earlier visits beside its newest one: 0 forgets them, 1 keeps the plain mean."""


class DifficultyCurriculumConfig(ActiveCurriculumConfig):
    """`difficulty`: prefer examples whose mean reward is near `target`."""

    type: Literal["difficulty"] = "difficulty"
    """Tag."""
    target: float = 0.5
    """Mean reward that is drawn most often."""
    spread: float = Field(0.5, gt=0)
    """Distance from `target` from which on an example is drawn least often, in units of reward."""
    floor: float = Field(0.1, gt=0, le=1)
    """Weight of such an example; the best ones, and those never visited, have 1."""


class CustomCurriculumConfig(ActiveCurriculumConfig):
    """`custom`: weights by a function of your own."""

    type: Literal["custom"] = "custom"
    """Tag."""
    import_path: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function`, called once per round as `function(ExampleStats(...), **kwargs)`; it returns one
    weight >= 0 per example."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function."""


CurriculumConfig = Annotated[
    NoCurriculumConfig | DifficultyCurriculumConfig | CustomCurriculumConfig, Field(discriminator="type")
]
