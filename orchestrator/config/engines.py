"""Configuration of the inference engines."""

from typing import Literal

from pydantic import Field, model_validator

from runtime.config.config import Config
from runtime.config.keys import Advanced


class ScriptedEngineConfig(Config):
    """The engine of `backend = "scripted"`: no model; what it says depends on a request's seed and prompt alone."""

    replies: tuple[str, ...] = ()
    """Texts to answer with, each as often as it is listed; none: random tokens, which no environment rewards."""
    latency_s: float = Field(0.0, ge=0)
    """Median seconds of one answer."""
    latency_spread: float = Field(0.0, ge=0)
    """Standard deviation of the logarithm of the latency; 0: every answer takes `latency_s`."""
    seed: int = Field(0, ge=0)
    """Another seed gives other answers to the same requests."""


class OpenAIConfig(Config):
    """An OpenAI-compatible server (`backend = "openai"`)."""

    api: Literal["chat", "completions"] = "chat"
    """`chat`: `/v1/chat/completions`, the server applies its template; `completions`: `/v1/completions`, the template
    in `model.path` is applied here."""
    model: str | None = None
    """Name of the model in requests; unset: the first that `/v1/models` lists."""
    api_key_var: str | None = None
    """Environment variable that holds the API key; unset: no key is sent."""
    token_limit_key: Advanced[Literal["max_tokens", "max_completion_tokens"]] = "max_tokens"
    """What the server calls the bound on the tokens of an answer; OpenAI's newer models refuse `max_tokens`."""


class EnginesConfig(Config):
    """The inference engines, as whoever plays environments asks them."""

    backend: Literal["http", "openai", "sglang", "scripted"] = "http"
    """`http`: servers of ours (`inference`, whichever engine it runs); `sglang`: SGLang servers; `openai`: any
    OpenAI-compatible server, for `orchestrator eval` only, since it takes no weights; `scripted`: answers made up in
    this process, for tests and benchmarks."""
    scripted: Advanced[ScriptedEngineConfig] = ScriptedEngineConfig()
    """What the engine of `backend = "scripted"` answers, and how fast."""
    openai: Advanced[OpenAIConfig] = OpenAIConfig()
    """How an OpenAI-compatible server is asked."""
    urls: tuple[str, ...] = Field(("http://127.0.0.1:8000",), min_length=1)
    """Base URLs of the engines; requests go to the one with the least in flight."""
    resolve_dns: Advanced[bool] = False
    """Take every address that a host in `urls` resolves to for an engine of its own; http only. Names are looked up
    again every 10 s: new addresses join with the current weights first, those that are gone leave."""
    request_timeout_s: Advanced[float] = Field(120.0, gt=0)
    """Seconds that one generate request may take, retries not included."""
    max_retries: Advanced[int] = Field(3, ge=0)
    """Tries after the first for connection errors, 429 and 5xx, with jittered back-off."""
    start_timeout_s: float = Field(180.0, gt=0)
    """Seconds to wait for every engine to be healthy at start-up; then the run goes on with those that are."""
    update_timeout_s: Advanced[float] = Field(120.0, gt=0)
    """Seconds that applying a weight version may take on one engine."""

    @model_validator(mode="after")
    def _check_urls(self) -> "EnginesConfig":
        bad = [url for url in self.urls if not url.startswith(("http://", "https://"))]
        if bad:
            raise ValueError(f"urls must start with http:// or https://, got {bad}")
        if self.resolve_dns and any(url.startswith("https://") for url in self.urls):
            raise ValueError("resolve_dns does not go with https: a certificate is for a name, not for an address")
        if self.resolve_dns and self.backend not in ("http", "sglang"):
            raise ValueError(f"resolve_dns does not go with backend = {self.backend!r}: use 'http' or 'sglang'")
        return self


class PolicyEnginesConfig(EnginesConfig):
    """The inference engines that serve the policy in training."""

    canary_interval_steps: Advanced[int] = Field(10, ge=0)
    """Policy versions between two comparisons of every engine's answers with the trainer's; 0: never."""
    canary_tolerance: Advanced[float] = Field(0.2, gt=0)
    """Largest difference of a log probability, in nats, between engine and trainer; a larger one ends the run."""
