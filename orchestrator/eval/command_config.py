"""Configuration of `orchestrator eval`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from orchestrator.config import EvalEnvConfig, ModelConfig
from orchestrator.config_rules import check_labels
from orchestrator.engines.config import EnginesConfig
from runtime.config.config import Config, LogConfig


class EvalEnginesConfig(EnginesConfig):
    """The server to evaluate."""

    backend: Literal["http", "openai", "sglang", "scripted"] = "openai"
    """`openai`: any OpenAI-compatible server; `http` (`inference`) and `sglang`: their own routes, tokens in and out;
    `scripted`: answers made up in this process."""


class EvalCommandConfig(Config):
    """`orchestrator eval`: play environments against a server and report, without a trainer or a run directory."""

    envs: tuple[EvalEnvConfig, ...] = Field(min_length=1)
    """Environments to evaluate on."""
    engines: EvalEnginesConfig = EvalEnginesConfig()
    """The server."""
    model: ModelConfig | None = None
    """Tokenizer and chat template; needed by every backend but `openai` with `api = "chat"`."""
    output: Path = Path("eval")
    """Folder for `eval.json` and `rollouts.jsonl`; what is there of an evaluation before is replaced."""
    max_in_flight: int = Field(64, gt=0)
    """Rollouts that run at the same time."""
    timeout_s: float = Field(3600.0, gt=0)
    """Seconds that the evaluation may take; what is not finished then counts as failed."""
    max_error_rate: float = Field(0.5, ge=0, le=1)
    """Share of failed rollouts of one environment above which the exit code is 1."""
    seed: int = Field(0, ge=0)
    """Seed of every rollout."""
    log: LogConfig = LogConfig()
    """Logging."""
    dry_run: bool = False
    """Print the resolved config and exit."""

    @model_validator(mode="after")
    def _check_rules(self) -> "EvalCommandConfig":
        check_labels("envs", [env.label for env in self.envs])
        engines = self.engines
        if self.model is None and (engines.backend != "openai" or engines.openai.api == "completions"):
            what = "api = 'completions'" if engines.backend == "openai" else f"backend = {engines.backend!r}"
            raise ValueError(f"engines: {what} needs model.path, for the tokenizer and the chat template")
        return self
