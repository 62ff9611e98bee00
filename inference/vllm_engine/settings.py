"""How the plugin inside vLLM's processes gets the service's config: as JSON in the environment."""

import os

from inference.config import InferenceConfig

VARIABLE = "TANDEM_INFERENCE_CONFIG"
"""Holds the path of the admin token and not the token: other processes of the user could read the environment."""
PLUGIN_NAME = "tandem"
"""Name of both entry points, and of the weight-transfer backend."""
STAGING_GRACE_S = 60.0
"""Seconds for a transfer that ended in time to be hashed and checked."""


def config_from_environment() -> InferenceConfig:
    """That of the service that started vLLM. Raises `RuntimeError` when vLLM was started by something else."""
    value = os.environ.get(VARIABLE)
    if value is None:
        raise RuntimeError(f"{VARIABLE} is not set: start vLLM with `inference --engine vllm`")
    config: InferenceConfig = InferenceConfig.model_validate_json(value)
    return config


def staging_timeout_s(config: InferenceConfig) -> float:
    """How long a worker may take to say what became of a publish: as long as the user lets a transfer take, and some
    more, because the worker gives up by itself then and says why."""
    return config.weights.timeout_s + STAGING_GRACE_S
