"""Configuration of the `orchestrator` service."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from orchestrator.advantages.config import AdvantageConfig, GrpoAdvantageConfig, needs_siblings
from orchestrator.algorithms.config import AlgorithmConfig, RlAlgorithmConfig, TeacherConfig, uses_advantages
from orchestrator.config_rules import check_engines, check_env, check_labels
from orchestrator.curriculum.config import CurriculumConfig, NoCurriculumConfig
from orchestrator.engines.config import EnginesConfig
from runtime.config.config import Config, HealthConfig, ServiceConfig
from transport.security.exposure import check_bind


class ModelConfig(Config):
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


class EvalEnvConfig(PlayedEnvConfig):
    """One environment to evaluate on."""

    num_examples: int | None = Field(None, gt=0)
    """Examples to play, from the first on; unset: all."""
    rollouts_per_example: int = Field(1, gt=0)
    """Rollouts of each example; pass@k is reported for k up to this number."""
    pass_reward: float = 1.0
    """Reward from which on a rollout has passed."""

    @property
    def as_env(self) -> EnvConfig:
        """What it takes to load it."""
        shared = {name: getattr(self, name) for name in PlayedEnvConfig.model_fields}
        return EnvConfig(**shared, group_size=self.rollouts_per_example)


class EvalConfig(Config):
    """Evaluation beside training."""

    envs: tuple[EvalEnvConfig, ...] = ()
    """Environments to evaluate on; none: no evaluation."""
    every_steps: int = Field(50, gt=0)
    """Policy versions that are multiples of this are evaluated, version 0 and the last one included."""
    max_in_flight: int = Field(64, gt=0)
    """Evaluation rollouts that run at the same time, besides those of training."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds that one evaluation may take. Newer weights wait for its end."""


class BatchServerConfig(Config):
    """The server that trainer ranks pull batches from."""

    endpoint: str = "tcp://127.0.0.1:29600"
    """ZeroMQ address to bind. One that other machines reach needs `keys_dir`."""
    keys_dir: Path | None = None
    """Folder of CURVE keys (`rl keys DIR` makes one): `server.secret`, `server.public`, and a `client*.public` for each
    trainer that may connect. With it the link is encrypted and nobody else is served."""
    insecure: bool = False
    """Bind an address that other machines reach without keys: anyone there can read and steer the run. Logged every
    minute."""
    peer_timeout_s: float = Field(3.0, gt=0)
    """Seconds of silence (heartbeats come every second) after which a trainer rank counts as dead."""
    max_ahead: int = Field(2, ge=1)
    """Batches that may lie untrained in the outbox."""
    record_batches: bool = False
    """Keep batches that were committed in `outbox/retired/`, so that `trainer --replay runs/NAME/outbox` finds all."""

    @model_validator(mode="after")
    def _check_exposure(self) -> "BatchServerConfig":
        if self.keys_dir is not None and self.insecure:
            raise ValueError("keys_dir and insecure = true contradict each other: remove one")
        check_bind(self.endpoint, has_keys=self.keys_dir is not None, insecure=self.insecure)
        return self


class OrchestratorConfig(ServiceConfig):
    """`orchestrator`: schedule rollouts and ship batches.

    Other commands: `orchestrator eval @ FILE`, `orchestrator ledger RUN`, `orchestrator check-advantage PATH`."""

    model: ModelConfig
    """Tokenizer of the policy."""
    engines: EnginesConfig = EnginesConfig()
    """Inference engines."""
    envs: tuple[EnvConfig, ...] = Field(min_length=1)
    """Environments to train on."""
    server: BatchServerConfig = BatchServerConfig()
    """Batch server."""
    eval: EvalConfig = EvalConfig()
    """Evaluation beside training."""
    health: HealthConfig = HealthConfig(port=9101)
    """Health endpoint."""
    max_steps: int = Field(100, gt=0)
    """Batches to ship."""
    batch_size: int = Field(128, gt=0)
    """Rollouts in one batch. Batches hold whole groups: one may be larger by less than a group."""
    max_staleness: int = Field(2, ge=0)
    """Largest staleness of a sample, in policy versions, when its batch is cut. 0 is synchronous."""
    staleness_policy: Literal["wait", "drop"] = "wait"
    """How `max_staleness` is kept. `wait`: batches in dispatch order, the same whatever the timing; `drop`: batches in
    the order groups finish, and what comes too late is thrown away, which punishes long rollouts."""
    max_in_flight: int = Field(512, gt=0)
    """Rollouts that run at the same time, at most."""
    concurrency: Literal["fixed", "adaptive"] = "fixed"
    """`fixed`: always `max_in_flight` rollouts; `adaptive`: up to as many, but hardly more than the engines have places
    for, by what their health endpoints say."""
    concurrency_period_s: float = Field(2.0, gt=0)
    """Seconds between two looks at the engines under `concurrency = "adaptive"`."""
    advantage: AdvantageConfig = GrpoAdvantageConfig()
    """Advantage function, called once per group."""
    algorithm: AlgorithmConfig = RlAlgorithmConfig()
    """What rollouts are trained for."""
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Frozen models by name, for the algorithms `sft` and `opd`."""
    max_zero_signal_groups: int = Field(500, gt=0)
    """Groups in a row without any advantage after which the run stops with advice."""
    max_error_rate: float = Field(0.9, gt=0, le=1)
    """Share of failed rollouts among the last `error_window` of one environment at which the run stops; also the share
    of groups that failures cost as a whole, among its last groups."""
    error_window: int = Field(200, gt=0)
    """Rollouts of one environment that `max_error_rate` looks at, and as many groups as have so many, at least 40."""
    admin_token_file: Path | None = None
    """File with the token of the engines' admin routes."""
    save_rollouts: bool = True
    """Write every finished group to `rollouts/step-*.jsonl`."""
    seed: int = Field(0, ge=0)
    """Seed of the example order and of every rollout."""

    @model_validator(mode="after")
    def _check_rules(self) -> "OrchestratorConfig":
        check_labels("envs", [env.label for env in self.envs])
        check_labels("eval.envs", [env.label for env in self.eval.envs])
        check_engines(self.engines)
        for env in self.envs:
            check_env(env, self.advantage_of(env), self.algorithm_of(env), self.teachers)
        if self.max_in_flight < self.largest_group:
            raise ValueError(
                f"max_in_flight ({self.max_in_flight}) is below the largest envs[].group_size ({self.largest_group})"
            )
        return self

    @property
    def largest_group(self) -> int:
        """The largest `envs[].group_size`."""
        return max(env.group_size for env in self.envs)

    def advantage_of(self, env: EnvConfig) -> AdvantageConfig:
        """The advantage function of `env`, which must be one of `envs`."""
        return env.advantage or self.advantage

    def algorithm_of(self, env: EnvConfig) -> AlgorithmConfig:
        """The algorithm of `env`, which must be one of `envs`."""
        return env.algorithm or self.algorithm

    def min_survivors_of(self, env: EnvConfig) -> int:
        """Fewest rollouts of a group of `env` that are trained."""
        compares = uses_advantages(self.algorithm_of(env)) and needs_siblings(self.advantage_of(env))
        return env.min_group_size or (2 if compares else 1)
