"""Configuration of what rollouts are trained for, and of the frozen teachers that some algorithms need."""

from typing import Annotated, Literal

from pydantic import Field

from orchestrator.config.engines import OpenAIConfig
from runtime.config.config import Config
from runtime.config.keys import Advanced


class AlgorithmConfigBase(Config):
    """The key that goes with every algorithm, whatever its `type`."""

    observation_weight: Advanced[float] = Field(0.0, ge=0)
    """Cross-entropy weight of the tokens that the environment wrote between turns; 0: they are context only."""


class RlAlgorithmConfig(AlgorithmConfigBase):
    """`rl`: the policy's own rollouts, weighted by their advantages."""

    type: Literal["rl"] = "rl"
    """`rl`: the policy's own rollouts, weighted by their advantages."""


class SftAlgorithmConfig(AlgorithmConfigBase):
    """`sft`: a frozen teacher plays the environment, and the policy imitates it (cross-entropy)."""

    type: Literal["sft"] = "sft"
    """`sft`: rollouts of a frozen teacher, which the policy imitates."""
    teacher: str
    """`sft`: name in `teachers` of the model that generates."""
    weight: Advanced[float] = Field(1.0, gt=0)
    """`sft`: cross-entropy weight of each token that the teacher sampled."""


class OpdAlgorithmConfig(AlgorithmConfigBase):
    """`opd`: the policy's own rollouts, pulled towards a teacher on every sampled token (on-policy distillation)."""

    type: Literal["opd"] = "opd"
    """`opd`: the policy's own rollouts, pulled towards a teacher on every sampled token."""
    teacher: str
    """`opd`: name in `teachers` of the model that scores."""
    weight: Advanced[float] = Field(1.0, gt=0)
    """`opd`: weight of the distance to the teacher (`ref_kl`) on each sampled token."""
    rl_weight: Advanced[float] = Field(0.0, ge=0)
    """`opd`: weight of the advantages beside that distance; 0: rewards only show in metrics."""


AlgorithmConfig = Annotated[
    RlAlgorithmConfig | SftAlgorithmConfig | OpdAlgorithmConfig,
    Field(discriminator="type"),
]


def uses_advantages(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantage function has a say."""
    if isinstance(algorithm, OpdAlgorithmConfig):
        return algorithm.rl_weight > 0
    return isinstance(algorithm, RlAlgorithmConfig)


def teacher_name(algorithm: AlgorithmConfig) -> str | None:
    """The key in `teachers` that it needs."""
    return None if isinstance(algorithm, RlAlgorithmConfig) else algorithm.teacher


class TeacherConfig(Config):
    """A frozen model: behind an inference server of ours, with the tokenizer of the policy, or behind any
    OpenAI-compatible server, which can only generate (`sft`)."""

    backend: Literal["http", "openai"] = "http"
    """`http`: `inference`; `openai`: an OpenAI-compatible server. What it writes is tokenized by the policy's
    tokenizer."""
    openai: Advanced[OpenAIConfig] = OpenAIConfig()
    """How an OpenAI-compatible server is asked."""
    url: str = Field(pattern=r"^https?://\S+$")
    """Base URL of the teacher's server, `http://` or `https://`."""
    model: Advanced[str | None] = None
    """Name that the `/health` of a server of ours must say; unset: any."""
    max_concurrency: Advanced[int] = Field(32, gt=0)
    """Scoring requests that run at the same time; further ones wait."""
    request_timeout_s: Advanced[float] = Field(120.0, gt=0)
    """Seconds that one request may take, retries not included."""
    max_retries: Advanced[int] = Field(3, ge=0)
    """Tries after the first for connection errors, 429 and 5xx, with jittered back-off."""
    start_timeout_s: Advanced[float] = Field(180.0, gt=0)
    """Seconds to wait for the teacher to be healthy at start-up."""
