"""The entry points that vLLM loads: `vllm.general_plugins` in every process, `vllm.endpoint_plugins` in the API server.

Both are called `tandem` and load only where `VLLM_PLUGINS` names them, which `command.py` sees to.
"""

import asyncio
from argparse import Namespace
from typing import TYPE_CHECKING

import torch

from inference.api.engine import EngineLimits
from inference.api.handlers import REQUEST_TIMEOUT_S
from inference.api.images import ImageLimits
from inference.api.requests import max_body_bytes
from inference.vision_models import VISION_MODEL_TYPES, image_limits
from inference.vllm_engine.checkpoint import checkpoint_digest
from inference.vllm_engine.command import PLUGIN_NAME, config_from_environment, staging_timeout_s
from runtime.base.files import read_or_make_secret
from transport.wire.generation import GENERATE_PATH, SCORE_PATH, WEIGHTS_PATH, ServedWeights

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.config import ModelConfig
    from vllm.engine.protocol import EngineClient


def register() -> None:
    """General plugin: make the weight-transfer backend known. vLLM calls it once per process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    module = "inference.vllm_engine.weight_engine"
    WeightTransferEngineFactory.register_engine(PLUGIN_NAME, module, "PublishedWeightEngine")


class EndpointPlugin:
    """Endpoint plugin: our routes on vLLM's server, `GET /health` in our shape among them."""

    name = PLUGIN_NAME
    required_tasks = ("generate",)

    def __init__(self) -> None:
        from inference.vllm_engine.routes import Routes

        self._config = config = config_from_environment()
        token = None if config.admin_token_file is None else read_or_make_secret(config.admin_token_file)
        path = config.model.path.resolve()
        self._routes = Routes(path.name, token, REQUEST_TIMEOUT_S, max_body_bytes(path))

    def attach_router(self, app: "FastAPI") -> None:
        """vLLM's hook: add our routes to its server."""
        routes = self._routes
        for method, path, handler in (
            ("GET", "/health", routes.health),
            ("POST", GENERATE_PATH, routes.generate),
            ("POST", SCORE_PATH, routes.score),
            ("GET", WEIGHTS_PATH, routes.get_weights),
            ("POST", WEIGHTS_PATH, routes.apply_weights),
        ):
            app.add_api_route(path, handler, methods=[method], include_in_schema=False, response_model=None)

    async def init_state(self, engine_client: "EngineClient | None", state: "State", args: Namespace) -> None:
        """vLLM's hook, called when the model is loaded, which is version 0."""
        from inference.vllm_engine.engine import VllmEngine
        from inference.vllm_engine.loaded_adapters import LoadedAdapters

        assert engine_client is not None, "a server that generates has an engine"
        config = self._config
        digest = await asyncio.to_thread(checkpoint_digest, config.model.path, getattr(torch, config.model.dtype))
        await engine_client.update_weight_version("0")
        start = ServedWeights(version=0, digest=digest)
        self._routes.engine = VllmEngine(
            engine_client,
            limits_of(engine_client),
            start=start,
            staging_timeout_s=staging_timeout_s(config),
            adapters=None if config.vllm.max_lora_rank is None else LoadedAdapters(engine_client, start, config),
        )


def limits_of(engine_client: "EngineClient") -> EngineLimits:
    """What vLLM has made of its arguments and the model."""
    config = engine_client.vllm_config
    return EngineLimits(
        vocab_size=config.model_config.get_vocab_size(),
        max_model_len=config.model_config.max_model_len,
        max_batch_size=config.scheduler_config.max_num_seqs,
        images=vllm_image_limits(config.model_config),
    )


def vllm_image_limits(model: "ModelConfig") -> ImageLimits | None:
    """What images must be, `None` for a model that takes none.

    Raises `RuntimeError` where vLLM would compute something else than transformers does, without an error.
    """
    kind = model.hf_config.model_type
    if kind not in VISION_MODEL_TYPES or model.multimodal_config is None:
        return None
    if model.multimodal_config.mm_device_do_normalize:
        raise RuntimeError("--mm-device-do-normalize would normalise images twice: take it out of vllm.extra_args")
    if kind == "qwen3_vl" and not model.hf_text_config.rope_parameters.get("mrope_interleaved"):
        raise RuntimeError("config.json must have mrope_interleaved = true in rope_parameters: transformers implies it")
    return image_limits(model.hf_config)
