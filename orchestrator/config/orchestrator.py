"""Configuration of the `orchestrator` service, and which settings go together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from orchestrator.config.advantage import AdvantageConfig, GrpoAdvantageConfig, min_survivors, needs_siblings
from orchestrator.config.algorithm import (
    AlgorithmConfig,
    OpdAlgorithmConfig,
    RlAlgorithmConfig,
    TeacherConfig,
    teacher_name,
    uses_advantages,
)
from orchestrator.config.engines import EnginesConfig, PolicyEnginesConfig
from orchestrator.config.envs import EnvConfig, PolicyModelConfig, check_labels
from orchestrator.config.eval import EvalConfig
from runtime.config.config import Config, HealthConfig, ServiceConfig
from runtime.config.keys import Advanced
from transport.security.exposure import check_bind


def check_engines(engines: EnginesConfig) -> None:
    """Raise `ValueError` if the policy cannot be trained with these engines."""
    if engines.backend == "openai":
        raise ValueError(
            "engines.backend = 'openai' cannot train: an OpenAI-compatible server takes no weight updates and does not "
            "say which tokens it sampled; use 'http' or 'sglang', or evaluate that server with `orchestrator eval`"
        )


def check_env(
    env: "EnvConfig",
    advantage: AdvantageConfig,
    algorithm: AlgorithmConfig,
    teachers: Mapping[str, TeacherConfig],
) -> None:
    """Raise `ValueError`, naming the environment and what to change, unless `env` can learn as configured."""
    _check_group_size(env)
    _check_teacher(env, algorithm, teachers)
    if not uses_advantages(algorithm):
        if env.advantage is not None:
            raise ValueError(
                f"envs: {env.label!r} sets advantage {env.advantage.type!r}, which algorithm {algorithm.type!r} does "
                "not use: remove it"
            )
        return
    if needs_siblings(advantage) and env.group_size < 2:
        raise ValueError(
            f"envs: advantage {advantage.type!r} compares rollouts of a group: {env.label!r} needs group_size >= 2"
        )
    if env.min_group_size is not None and env.min_group_size < min_survivors(advantage):
        raise ValueError(
            f"envs: advantage {advantage.type!r} needs at least {min_survivors(advantage)} rollouts of a group: "
            f"{env.label!r} has min_group_size = {env.min_group_size}"
        )


def _check_group_size(env: "EnvConfig") -> None:
    if env.min_group_size is None:
        return
    if env.min_group_size > env.group_size:
        raise ValueError(
            f"envs: min_group_size ({env.min_group_size}) of {env.label!r} is above its group_size ({env.group_size})"
        )
    if env.drops_groups:
        raise ValueError(
            f"envs: {env.label!r} has failure_policy = 'drop_group', which leaves min_group_size no meaning: remove it"
        )


def _check_teacher(env: "EnvConfig", algorithm: AlgorithmConfig, teachers: Mapping[str, TeacherConfig]) -> None:
    name = teacher_name(algorithm)
    if name is not None and name not in teachers:
        known = ", ".join(sorted(teachers)) or "none"
        raise ValueError(
            f"envs: algorithm {algorithm.type!r} of {env.label!r} names teacher {name!r}, but teachers has {known}"
        )
    if name is not None and isinstance(algorithm, OpdAlgorithmConfig) and teachers[name].backend == "openai":
        raise ValueError(
            f"envs: {env.label!r} has algorithm {algorithm.type!r}, which needs log probabilities of given tokens: "
            f"teacher {name!r} is an OpenAI-compatible server, which does not tell them; use backend = 'http'"
        )


class BatchServerConfig(Config):
    """The server that trainer ranks pull batches from."""

    endpoint: str = "tcp://127.0.0.1:29600"
    """ZeroMQ address to bind. One that other machines reach needs `keys_dir`."""
    keys_dir: Path | None = None
    """Folder of CURVE keys (`rl keys DIR` makes one): `server.secret`, `server.public`, and a `client*.public` for each
    trainer that may connect. With it the link is encrypted and nobody else is served."""
    insecure: Advanced[bool] = False
    """Bind an address that other machines reach without keys: anyone there can read and steer the run. Logged every
    minute."""
    peer_timeout_s: Advanced[float] = Field(3.0, gt=0)
    """Seconds of silence (heartbeats come every second) after which a trainer rank counts as dead."""
    max_ahead: Advanced[int] = Field(2, ge=1)
    """Batches that may lie untrained in the outbox; then the orchestrator waits for the trainer."""
    record_batches: Advanced[bool] = False
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

    model: PolicyModelConfig
    """The policy, as far as the orchestrator needs it: its tokenizer and chat template."""
    engines: PolicyEnginesConfig = PolicyEnginesConfig()
    """The inference engines that serve the policy."""
    envs: tuple[EnvConfig, ...] = Field(min_length=1)
    """Environments that the policy is trained on, at least one."""
    server: BatchServerConfig = BatchServerConfig()
    """The server that trainer ranks pull batches from."""
    eval: EvalConfig = EvalConfig()
    """Evaluation of the policy while it is trained; none without `eval.envs`."""
    health: HealthConfig = HealthConfig(port=9101)
    """Endpoint with `/health`, `/live`, `/ready` and, for Prometheus, `/metrics`."""
    max_steps: int = Field(100, gt=0)
    """Batches that the trainer gets, one per step; then the run ends."""
    batch_size: int = Field(128, gt=0)
    """Rollouts in one batch. Batches hold whole groups: one may be larger by less than a group."""
    max_staleness: int = Field(2, ge=0)
    """Largest staleness of a sample, in policy versions, when its batch is cut. 0 is synchronous."""
    staleness_policy: Literal["wait", "drop"] = "wait"
    """How `max_staleness` is kept. `wait`: batches in dispatch order, the same whatever the timing; `drop`: batches in
    the order groups finish, and what comes too late is thrown away, which punishes long rollouts."""
    max_in_flight: int = Field(512, gt=0)
    """Rollouts that run at the same time, at most."""
    concurrency: Advanced[Literal["fixed", "adaptive"]] = "fixed"
    """`fixed`: always `max_in_flight` rollouts; `adaptive`: up to as many, but hardly more than the engines have places
    for, by what their health endpoints say every 2 s."""
    advantage: AdvantageConfig = GrpoAdvantageConfig()
    """Advantage function, called once per group of rollouts of one example."""
    algorithm: AlgorithmConfig = RlAlgorithmConfig()
    """Who makes the rollouts, and what the policy learns of them."""
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Frozen models by name, for the algorithms `sft` and `opd`."""
    max_zero_signal_groups: Advanced[int] = Field(500, gt=0)
    """Groups in a row without any advantage after which the run stops with advice."""
    max_error_rate: Advanced[float] = Field(0.9, gt=0, le=1)
    """Share of failed rollouts among the last 200 of one environment at which the run stops; also the share of groups
    that failures cost as a whole, among as many of its last groups as have 200 rollouts, at least 40."""
    admin_token_file: Path | None = None
    """File with the token of the engines' admin routes."""
    save_rollouts: Advanced[bool] = True
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
        """The largest `envs[].group_size`: the fewest places that `max_in_flight` must have."""
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
