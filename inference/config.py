"""Configuration of the `inference` service."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from runtime.config.config import Config, HealthConfig, ServiceConfig
from runtime.config.keys import Advanced
from transport.security.exposure import check_exposure, is_local, netloc


class ServedModelConfig(Config):
    """The model that is served, as version 0, until the trainer has made newer weights."""

    path: Path
    """Hugging Face folder with weights, config and tokenizer."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in memory. float32 is exact, and the fastest on a CPU."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` takes a GPU if there is one."""


class ServerConfig(Config):
    """The HTTP server that generates."""

    host: str = "127.0.0.1"
    """Address to bind. One that other machines reach needs `admin_token_file`."""
    insecure: Advanced[bool] = False
    """Bind an address that other machines reach without an admin token. Logged every minute."""
    port: int = Field(8000, ge=0, le=65535)
    """TCP port; 0 lets the system choose."""
    grace_s: Advanced[float] = Field(10.0, ge=0)
    """Seconds that requests in flight get to finish after SIGTERM; the rest is answered with 503."""

    @property
    def is_exposed(self) -> bool:
        """Whether other machines can reach the server."""
        return not is_local(f"http://{netloc(self.host, self.port)}")


class TorchEngineConfig(Config):
    """The engine of `engine = "torch"`, in this process: exact, and for small models."""

    max_batch_size: int = Field(256, gt=0)
    """Sequences that are decoded together; further requests wait."""
    max_model_len: int = Field(1024, gt=1)
    """Prompt plus completion, in tokens; also sizes the KV cache."""
    num_threads: Advanced[int] = Field(1, gt=0)
    """Torch threads on a CPU. More than one slows small models down."""


_OWN_FLAGS = (
    "--host",
    "--port",
    "--model",
    "--api-key",
    "--weight-transfer-config",
    "--worker-extension-cls",
    "--dtype",
    "--enable-lora",
    "--max-lora-rank",
    "--max-loras",
    "--max-cpu-loras",
)


class VllmEngineConfig(Config):
    """vLLM's own server, run as a child process with our plugin."""

    max_batch_size: int = Field(256, gt=0)
    """Sequences that are decoded together (`--max-num-seqs`); further requests wait."""
    max_model_len: int | None = Field(None, gt=1)
    """Prompt plus completion, in tokens; by default what the model's config allows."""
    tensor_parallel_size: int = Field(1, gt=0)
    """Devices that share each layer."""
    data_parallel_size: int = Field(1, gt=0)
    """Copies of the engine behind one address."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory that vLLM takes. On a CPU the KV cache has `VLLM_CPU_KVCACHE_SPACE` GiB (1 if unset)."""
    enforce_eager: bool = True
    """No compilation: starts at once, and is the faster one for tiny models. Set false on a GPU."""
    max_lora_rank: Advanced[int | None] = Field(None, gt=0, le=512)
    """Serve LoRA adapters of up to this rank, and nothing else; `rl` takes the trainer's `model.lora.rank`."""
    max_loras: Advanced[int] = Field(4, gt=0)
    """Adapters, that is policy versions, that are decoded together: a request ends with the one it began with. Requests
    of further versions wait."""
    start_timeout_s: Advanced[float] = Field(300.0, gt=0)
    """Seconds that vLLM may take to load and answer."""
    extra_args: tuple[str, ...] = ()
    """Further arguments of vLLM's server, as it spells them: `["--kv-cache-dtype", "fp8"]`."""

    @field_validator("extra_args")
    @classmethod
    def _check_extra_args(cls, extra_args: tuple[str, ...]) -> tuple[str, ...]:
        taken = [text for text in extra_args if text.split("=")[0] in _OWN_FLAGS]
        if taken:
            raise ValueError(f"{taken[0]} is set by this service; vllm.extra_args must not repeat it")
        return extra_args


class WeightFetchConfig(Config):
    """Fetching policy versions from a trainer that serves them itself (`weights.channel = "zmq"` of the trainer)."""

    keys_dir: Path | None = None
    """Folder of CURVE keys: this engine's pair and the trainer's `server.public`. Needed when the trainer has keys."""
    key_name: Advanced[str] = Field("client", pattern=r"^client[A-Za-z0-9._-]*$")
    """This engine's pair in `keys_dir`: `<key_name>.secret` and `<key_name>.public`."""
    timeout_s: Advanced[float] = Field(600.0, gt=0)
    """Seconds that a transfer may take (vLLM: reading files, too). The old version stays in service meanwhile. The
    orchestrator's `engines.update_timeout_s` is shorter by default: raise both for large models."""
    lost_timeout_s: Advanced[float] = Field(10.0, gt=0)
    """Seconds without an answer of a trainer rank after which a transfer is given up."""
    chunk_bytes: Advanced[int] = Field(8 << 20, ge=1024, le=32 << 20)
    """Bytes that are asked for at once, of each rank."""


class InferenceConfig(ServiceConfig):
    """`inference`: serve a policy over HTTP."""

    engine: Literal["torch", "vllm"] = "torch"
    """Which engine runs the model: `torch`, embedded and exact, or `vllm`, for GPUs and large models."""
    model: ServedModelConfig
    """The model that is served until the trainer has made newer weights."""
    server: ServerConfig = ServerConfig()
    """The HTTP server that generates."""
    health: HealthConfig = HealthConfig()
    """A second endpoint with `/health`, `/live`, `/ready` and `/metrics`, and a thread of its own: it answers even when
    the HTTP server, which has `/health`, too, hangs."""
    torch: TorchEngineConfig = TorchEngineConfig()
    """Settings of `engine = "torch"`."""
    vllm: VllmEngineConfig = VllmEngineConfig()
    """Settings of `engine = "vllm"`: vLLM's own server as a child process."""
    weights: WeightFetchConfig = WeightFetchConfig()
    """Fetching weights from the trainer over the network."""
    admin_token_file: Path | None = None
    """File with the token for the admin routes (mode 0600); made if it is not there. Without it they answer 403."""
    seed: int = Field(0, ge=0)
    """Seed of the sampling of requests that bring none of their own."""

    @property
    def is_open_to_others(self) -> bool:
        """Whether other machines reach a server without an admin token."""
        return self.server.is_exposed and self.admin_token_file is None

    @model_validator(mode="after")
    def _check_exposure(self) -> "InferenceConfig":
        check_exposure(
            f"http://{netloc(self.server.host, self.server.port)}",
            name=f"server.host {self.server.host}",
            is_protected=self.admin_token_file is not None,
            insecure=self.server.insecure,
            advice=": set admin_token_file, or server.insecure = true",
        )
        return self

    @model_validator(mode="after")
    def _check_device(self) -> "InferenceConfig":
        if self.engine == "vllm" and self.model.device != "auto":
            raise ValueError("model.device is for the torch engine: vLLM runs on the device that it was built for")
        return self
