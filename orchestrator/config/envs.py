"""Configuration of environments: how they are loaded, played and sampled, which examples they visit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from orchestrator.config.advantage import AdvantageConfig
from orchestrator.config.algorithm import AlgorithmConfig
from runtime.config.config import Config
from runtime.config.keys import Advanced


class NoCurriculumConfig(Config):
    """`none`: every example once per epoch, in an order drawn anew for every epoch."""

    type: Literal["none"] = "none"
    """`none`: every example once per epoch, in an order drawn anew for every epoch."""


class ActiveCurriculumConfig(Config):
    """Keys of every curriculum that weighs examples by what was seen of them."""

    refresh_groups: int = Field(128, gt=0)
    """Groups of the environment in one round: examples are drawn for a whole round, from what was seen up to the end of
    the round before the last one."""
    memory: float = Field(0.5, ge=0, le=1)
    """Weight of an example's earlier visits beside its newest one: 0 forgets them, 1 keeps the plain mean."""


class DifficultyCurriculumConfig(ActiveCurriculumConfig):
    """`difficulty`: prefer examples whose mean reward is near `target`."""

    type: Literal["difficulty"] = "difficulty"
    """`difficulty`: prefer examples whose mean reward is near `target`."""
    target: float = 0.5
    """Mean reward that is drawn most often."""
    spread: float = Field(0.5, gt=0)
    """Distance from `target` from which on an example is drawn least often, in units of reward."""
    floor: float = Field(0.1, gt=0, le=1)
    """Weight of such an example; the best ones, and those never visited, have 1."""


class CustomCurriculumConfig(ActiveCurriculumConfig):
    """`custom`: weights by a function of your own."""

    type: Literal["custom"] = "custom"
    """`custom`: weights by a function of your own (`import_path`)."""
    import_path: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function`, called once per round as `function(ExampleStats(...), **kwargs)`; it returns one
    weight >= 0 per example."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function in `import_path`."""


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
    """Most tokens that the policy may write in one turn."""


class PlayedEnvConfig(Config):
    """An environment, as it is loaded and played."""

    id: str
    """Environment id: an installed module that exports a verifiers Taskset (`reverse-text`, `owner/reverse-text`)."""
    name: str | None = None
    """Name in metrics and group ids, without a slash; the id without its owner by default. `all` is reserved."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment's taskset, as the environment documents them."""
    sampling: SamplingConfig = SamplingConfig()
    """How the completions of this environment's rollouts are sampled."""
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
        """The name in metrics, group ids and saved rollouts."""
        return self.name or self.id.rsplit("/", 1)[-1]


class EnvConfig(PlayedEnvConfig):
    """One environment that the policy is trained on."""

    group_size: int = Field(8, ge=1)
    """Rollouts that are made of each example, and compared with each other."""
    ratio: float = Field(1.0, gt=0)
    """Share of this environment's examples among all, relative to the others."""
    failure_policy: Advanced[Literal["partial", "retry", "drop_group"]] = "partial"
    """What a failed rollout costs. `partial`: only itself. `retry`: it is run again with another seed, up to
    `max_tries` times, then as `partial`. `drop_group`: its group; what still runs is cancelled."""
    max_tries: Advanced[int] = Field(3, ge=2)
    """Times that a rollout is run under `failure_policy = "retry"`, the first included."""
    min_group_size: Advanced[int | None] = Field(None, ge=1)
    """Fewest survivors that are trained; a smaller rest of a group is dropped. Unset: 2 where the advantage function
    compares rollouts with each other, else 1."""
    advantage: Advanced[AdvantageConfig | None] = None
    """Advantage function of this environment; unset: the run's."""
    algorithm: Advanced[AlgorithmConfig | None] = None
    """Algorithm of this environment; unset: the run's."""
    curriculum: Advanced[CurriculumConfig] = NoCurriculumConfig()
    """Which examples are visited; by default every one once per epoch."""
    state_columns: Advanced[tuple[str, ...]] = ()
    """Fields of the environment's `State` that are saved with every rollout, after `trajectory` and `sampling_args`."""

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
        raise ValueError(f"{key}: {unfit[0]!r} is not a name: it must not be empty or hold a slash; set {key}[].name")
    if len(set(labels)) < len(labels):
        raise ValueError(f"{key}: names must differ, got {list(labels)}; set {key}[].name")
