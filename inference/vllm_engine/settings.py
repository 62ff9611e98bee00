"""`PluginSettings`: what our plugin inside vLLM's processes needs to know, handed over in the environment."""

import os
from typing import Literal

import msgspec

VARIABLE = "TANDEM_VLLM_SETTINGS"
PLUGIN_NAME = "tandem"
"""Name of both entry points, and of the weight-transfer backend."""
PauseMode = Literal["keep", "wait", "abort"]


class PluginSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """JSON in `VARIABLE`. The token itself is not in it: other processes of the user could read the environment."""

    run_id: str
    model_name: str
    model_path: str
    dtype: str
    admin_token_file: str | None
    pause_mode: PauseMode
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


def settings_from_environment() -> PluginSettings:
    """What the service that started vLLM wants. Raises `RuntimeError` when vLLM was started by something else."""
    value = os.environ.get(VARIABLE)
    if value is None:
        raise RuntimeError(f"{VARIABLE} is not set: start vLLM with `inference --engine vllm`")
    return msgspec.json.decode(value, type=PluginSettings)
