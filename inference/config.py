"""Configuration of the `inference` service."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from runtime.config import Config, HealthConfig, ServiceConfig
from transport.exposure import is_local


class ModelConfig(Config):
    """The model to serve."""

    path: Path
    """Hugging Face folder with weights, config and tokenizer."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in memory. float32 is exact, and the fastest on a CPU."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` takes a GPU if there is one."""


class ServerConfig(Config):
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to bind. One that other machines reach needs `admin_token_file`."""
    insecure: bool = False
    """Bind an address that other machines reach without an admin token. Logged every minute."""
    port: int = Field(8000, ge=0, le=65535)
    """TCP port; 0 lets the system choose."""
    request_timeout_s: float = Field(1800.0, gt=0)
    """Seconds after which a request is dropped and answered with 504."""
    grace_s: float = Field(10.0, ge=0)
    """Seconds that requests in flight get to finish after SIGTERM; the rest is answered with 503."""

    @property
    def is_exposed(self) -> bool:
        """Whether other machines can reach the server."""
        return not is_local(f"http://{self.host}:{self.port}")


class TorchEngineConfig(Config):
    """The embedded engine."""

    max_batch_size: int = Field(256, gt=0)
    """Sequences that are decoded together; further requests wait."""
    max_model_len: int = Field(1024, gt=1)
    """Prompt plus completion, in tokens; also sizes the KV cache."""
    max_waiting: int = Field(16384, gt=0)
    """Requests that may wait for a slot; more are answered with 429."""
    num_threads: int = Field(1, gt=0)
    """Torch threads on a CPU. More than one slows small models down."""


class InferenceConfig(ServiceConfig):
    """`inference`: serve a policy over HTTP."""

    engine: Literal["torch", "vllm"] = "torch"
    """Which engine runs the model."""
    model: ModelConfig
    """The model to serve."""
    server: ServerConfig = ServerConfig()
    """The HTTP server."""
    health: HealthConfig = HealthConfig()
    """A second endpoint for `/health` and `/metrics`, with a thread of its own: it answers even when the HTTP server
    hangs. The HTTP server has both routes, too."""
    torch: TorchEngineConfig = TorchEngineConfig()
    """Settings of the embedded engine."""
    admin_token_file: Path | None = None
    """File with the token for the admin routes (mode 0600); made if it is not there. Without it they answer 403."""
    seed: int = Field(0, ge=0)
    """Seed of requests that bring none."""

    @model_validator(mode="after")
    def _check_exposure(self) -> "InferenceConfig":
        if self.server.is_exposed and self.admin_token_file is None and not self.server.insecure:
            raise ValueError(
                f"server.host {self.server.host} is reachable from other machines: set admin_token_file, "
                "or server.insecure = true"
            )
        return self
