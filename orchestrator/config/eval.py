"""Configuration of evaluation: beside training, and by `orchestrator eval`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from orchestrator.config.engines import EnginesConfig, OpenAIConfig
from orchestrator.config.envs import EnvConfig, PlayedEnvConfig, PolicyModelConfig, check_labels
from runtime.config.config import Config, LogConfig
from runtime.config.keys import Advanced


class EvalEnvConfig(PlayedEnvConfig):
    """One environment that a policy or a server is evaluated on."""

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
    """Evaluation of the policy while it is trained."""

    envs: tuple[EvalEnvConfig, ...] = ()
    """Environments to evaluate on; none: no evaluation."""
    every_steps: int = Field(50, gt=0)
    """Policy versions that are multiples of this are evaluated, version 0 and the last one included."""
    max_in_flight: Advanced[int] = Field(64, gt=0)
    """Evaluation rollouts that run at the same time, besides those of training."""
    timeout_s: Advanced[float] = Field(600.0, gt=0)
    """Seconds that one evaluation may take. Newer weights wait for its end."""


class EvalEnginesConfig(EnginesConfig):
    """The server that `orchestrator eval` evaluates."""

    backend: Literal["http", "openai", "sglang", "scripted"] = "openai"
    """`openai`: any OpenAI-compatible server; `http` (`inference`) and `sglang`: their own routes, tokens in and out;
    `scripted`: answers made up in this process."""
    openai: OpenAIConfig = OpenAIConfig()
    """How an OpenAI-compatible server is asked."""


class EvalCommandConfig(Config):
    """`orchestrator eval`: play environments against a server and report, without a trainer or a run directory."""

    envs: tuple[EvalEnvConfig, ...] = Field(min_length=1)
    """Environments that the server is evaluated on."""
    engines: EvalEnginesConfig = EvalEnginesConfig()
    """The server that is evaluated, and how it is asked."""
    model: PolicyModelConfig | None = None
    """Tokenizer and chat template; needed by every backend but `openai` with `api = "chat"`."""
    output: Path = Path("eval")
    """Folder for `eval.json` and `rollouts.jsonl`; what is there of an evaluation before is replaced."""
    max_in_flight: int = Field(64, gt=0)
    """Rollouts that run at the same time."""
    timeout_s: Advanced[float] = Field(3600.0, gt=0)
    """Seconds that the evaluation may take; what is not finished then counts as failed."""
    max_error_rate: Advanced[float] = Field(0.5, ge=0, le=1)
    """Share of failed rollouts of one environment above which the exit code is 1."""
    seed: int = Field(0, ge=0)
    """Seed of the sampling of every rollout; figures of two models with the same seed compare best."""
    log: LogConfig = LogConfig()
    """What is printed while it runs."""
    dry_run: bool = False
    """Print the resolved config as JSON and exit."""

    @model_validator(mode="after")
    def _check_rules(self) -> "EvalCommandConfig":
        check_labels("envs", [env.label for env in self.envs])
        engines = self.engines
        if self.model is None and (engines.backend != "openai" or engines.openai.api == "completions"):
            what = "api = 'completions'" if engines.backend == "openai" else f"backend = {engines.backend!r}"
            raise ValueError(f"engines: {what} needs model.path, for the tokenizer and the chat template")
        return self
