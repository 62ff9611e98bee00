"""Configuration of environments: how they are loaded, played and sampled, which examples they visit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from orchestrator.config.advantage import AdvantageConfig
from orchestrator.config.algorithm import (
    AlgorithmConfig,
)
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


class PolicyModelConfig(Config):
    """The policy, as far as the orchestrator needs it: tokenizer and chat template."""

    path: Path
    """Hugging Face folder with `tokenizer.json` and the chat template."""


class SamplingConfig(Config):
    """How completions are sampled. Truncation (top-p, top-k) is not offered: the trainer could not replay it."""

    temperature: float = Field(1.0, ge=0.01)
    """Softmax temperature. vLLM knows none below 0.01."""
    max_tokens: int = Field(256, gt=0)
    """Completion tokens of one turn."""


class PlayedEnvConfig(Config):
    """An environment, as it is loaded and played."""

    id: str
    """Environment id: an installed module that exports a verifiers Taskset (`reverse-text`, `owner/reverse-text`)."""
    name: str | None = None
    """Name in metrics and group ids, without a slash; the id without its owner by default. `all` is reserved."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment's taskset."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of this environment's rollouts."""
    driver: Literal["auto", "direct", "gateway"] = "auto"
    """`direct` runs single-turn tasks in this process; `gateway` runs the environment's own agents against our token
    gateway; `auto` takes `direct` when the environment allows it."""
    rollout_timeout_s: float = Field(300.0, gt=0)
    """Seconds that one rollout may take, scoring included."""
    num_workers: int = Field(0, ge=0, le=256)
    """Processes that play this environment; 0: it runs in the orchestrator's own process, where code that blocks stalls
    every rollout of the run."""

    @property
    def label(self) -> str:
        """The name used everywhere."""
        return self.name or self.id.rsplit("/", 1)[-1]


class EnvConfig(PlayedEnvConfig):
    """One environment to train on."""

    group_size: int = Field(8, ge=1)
    """Rollouts per example."""
    ratio: float = Field(1.0, gt=0)
    """Share of this environment's examples among all, relative to the others."""
    failure_policy: Literal["partial", "retry", "drop_group"] = "partial"
    """What a failed rollout costs. `partial`: itself, the others of its group are trained; `retry`: it is run again
    with another seed, at most `max_tries` times in all, then as `partial`; `drop_group`: its whole group, of which
    what still runs is cancelled at once.
    A group that is scored jointly is always lost as a whole, and run again as a whole."""
    max_tries: int = Field(3, ge=2)
    """Times that a rollout is run under `failure_policy = "retry"`, the first included."""
    min_group_size: int | None = Field(None, ge=1)
    """Fewest survivors that are trained; a smaller rest of a group is dropped. Unset: 2 where the advantage function
    compares rollouts with each other, else 1."""
    advantage: AdvantageConfig | None = None
    """Advantage function of this environment; unset: the run's."""
    algorithm: AlgorithmConfig | None = None
    """Algorithm of this environment; unset: the run's."""
    curriculum: CurriculumConfig = NoCurriculumConfig()
    """Which examples are visited; by default every one once per epoch."""
    state_columns: tuple[str, ...] = ()
    """Fields of the environment's `State` that are saved with every rollout, after `trajectory` and `sampling_args`."""
    worker_start_timeout_s: float = Field(180.0, gt=0)
    """Seconds that a worker may take to load the environment."""
    max_worker_restarts: int = Field(5, ge=0)
    """Times in a row that a worker which died is started again without having finished a rollout; then the run ends."""

    @property
    def refresh_groups(self) -> int:
        """Groups in one round of its curriculum; 0 if it has none."""
        return 0 if isinstance(self.curriculum, NoCurriculumConfig) else self.curriculum.refresh_groups

    @property
    def drops_groups(self) -> bool:
        """Whether one failure costs the group."""
        return self.failure_policy == "drop_group"

    @property
    def num_tries(self) -> int:
        """Times that a rollout is run before its failure counts."""
        return self.max_tries if self.failure_policy == "retry" else 1


def check_labels(key: str, labels: Sequence[str]) -> None:
    """Raise `ValueError` unless the environments of config key `key` have names that fit into metric keys,
    `{metric}/{name}/{stat}`."""
    if "all" in labels:
        raise ValueError(f'{key}: the name "all" is reserved for aggregate metrics; set {key}[].name')
    unfit = [label for label in labels if not label or "/" in label]
    if unfit:
        raise ValueError(f"{key}: {unfit[0]!r} is no name: it must not be empty or hold a slash; set {key}[].name")
    if len(set(labels)) < len(labels):
        raise ValueError(f"{key}: names must differ, got {list(labels)}; set {key}[].name")
