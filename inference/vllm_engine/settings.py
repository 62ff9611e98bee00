"""`PluginSettings`: what our plugin inside vLLM's processes needs to know, handed over in the environment."""

import os

import msgspec

from inference.config import WeightsConfig

VARIABLE = "TANDEM_VLLM_SETTINGS"
PLUGIN_NAME = "tandem"
"""Name of both entry points, and of the weight-transfer backend."""
STAGING_GRACE_S = 60.0
"""Seconds for a transfer that ended in time to be hashed and checked."""


class PluginSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """JSON in `VARIABLE`. The token itself is not in it: other processes of the user could read the environment."""

    run_id: str
    model_name: str
    model_path: str
    dtype: str
    admin_token_file: str | None
    max_waiting: int
    request_timeout_s: float
    weights: str
    """`inference.config.WeightsConfig` as JSON."""
    max_lora_rank: int | None
    adapter_dir: str
    """Folder for the adapters in service; only with `max_lora_rank`."""

    def encoded(self) -> str:
        """The value of `VARIABLE`."""
        return msgspec.json.encode(self).decode()

    @property
    def weights_config(self) -> WeightsConfig:
        """`weights`, decoded."""
        config: WeightsConfig = WeightsConfig.model_validate_json(self.weights)
        return config

    @property
    def staging_timeout_s(self) -> float:
        """How long a worker may take to say what became of a publish: as long as the user lets a transfer take, and
        some more, because the worker gives up by itself then and says why."""
        return self.weights_config.timeout_s + STAGING_GRACE_S


def settings_from_environment() -> PluginSettings:
    """What the service that started vLLM wants. Raises `RuntimeError` when vLLM was started by something else."""
    value = os.environ.get(VARIABLE)
    if value is None:
        raise RuntimeError(f"{VARIABLE} is not set: start vLLM with `inference --engine vllm`")
    return msgspec.json.decode(value, type=PluginSettings)
