"""Wiring of the `inference` service: run directory, HTTP server, engine, watchdog, and how each of them ends.

```
 bind port → load model (a thread; /health says 503) → announce → serve ─┬─ SIGTERM: stop admitting, drain, exit 0
                                                                         └─ engine died: exit 1 with the reason
```

vLLM brings its own HTTP server: then this process is its supervisor (`inference/vllm_engine/supervisor.py`).
"""

import asyncio
from typing import TYPE_CHECKING

import uvloop
from loguru import logger

from inference.api.handlers import REQUEST_TIMEOUT_S
from inference.api.requests import max_body_bytes
from inference.config import InferenceConfig
from inference.server.app import make_app
from inference.server.routes import ServerMetrics, ServerState
from inference.vllm_engine.supervisor import VllmSupervisor
from runtime.base.files import read_or_make_secret
from runtime.errors import ServiceError
from runtime.metrics.metric_log import MetricLog
from runtime.process.http_listener import listening
from runtime.process.service_process import ServiceProcess
from runtime.run_dir.run_dir import ServiceInfo
from transport.security.exposure import reminding_of_exposure

if TYPE_CHECKING:
    from inference.torch_engine.engine import TorchEngine
    from inference.torch_engine.loading import StartEngine


SERVICE = "inference"


def serve(config: InferenceConfig) -> None:
    """Serve until a stop signal. Raises `ServiceError` when the engine dies, `UserError` for what the user can mend."""
    token = None if config.admin_token_file is None else read_or_make_secret(config.admin_token_file)
    metrics = ServerMetrics()
    with (
        ServiceProcess(SERVICE, config, registry=metrics.registry) as process,
        reminding_of_exposure(exposure(config)),
    ):
        if config.engine == "vllm":
            return VllmSupervisor(config, process.run_dir, process.health, process.shutdown, process.health_url).run()
        state = ServerState(
            model_names=(config.model.path.resolve().name, str(config.model.path)),
            admin_token=token,
            request_timeout_s=REQUEST_TIMEOUT_S,
            health=process.health,
            metrics=metrics,
            max_body_bytes=max_body_bytes(config.model.path),
        )
        uvloop.run(_serve(config, state, process))


async def _serve(config: InferenceConfig, state: ServerState, process: ServiceProcess) -> None:
    stop = process.shutdown.event()
    server = config.server
    async with listening(make_app(state), server.host, server.port, name=SERVICE, shutdown_timeout_s=5.0) as url:
        with process.shutdown.loading(process.leave):
            engine = await _load(config, state)
        state.metric_log = MetricLog(SERVICE, process.run_dir, config.metrics)
        try:
            addresses = {"http": url, "health": process.health_url}
            process.announce(ServiceInfo(health_url=f"{url}/health", addresses=addresses))
            state.health.ready()
            logger.info(f"serving {config.model.path} at {url} ({_describe(engine)})")
            await until_stopped(engine, stop)
        finally:
            process.withdraw()
            state.health.stopping()
            await engine.stop(server.grace_s)
            state.metric_log.close()
    logger.info("stopped")


async def _load(config: InferenceConfig, state: ServerState) -> "TorchEngine":
    """Load in a thread, so that `/health` answers meanwhile; then open the engine to requests."""
    with state.health.waiting(f"the model in {config.model.path}"):
        start = await asyncio.to_thread(_load_torch_engine, config)
        engine, tokenizer = start(state.note_progress)
    state.loaded = (engine, tokenizer)
    return engine


def _load_torch_engine(config: InferenceConfig) -> "StartEngine":
    from inference.torch_engine.loading import load_engine  # torch: seconds, after the port is bound and answers

    return load_engine(config)


async def until_stopped(engine: "TorchEngine", stop: asyncio.Event) -> None:
    """Return at a stop signal. Raises `ServiceError` if the engine dies first."""
    waits = [asyncio.create_task(stop.wait()), asyncio.create_task(engine.ended())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if engine.failure is not None:
        logger.opt(exception=engine.failure).error("the engine died")
        raise ServiceError(f"the engine died: {engine.failure!r}")


def _describe(engine: "TorchEngine") -> str:
    limits = engine.limits
    return (
        f"{limits.max_batch_size} sequences of up to {limits.max_model_len} tokens, digest {engine.served.digest[:8]}"
    )


def exposure(config: InferenceConfig) -> str | None:
    """The reminder for a server that other machines reach without an admin token; `None` for any other."""
    if not config.is_open_to_others:
        return None
    return f"{config.server.host} is reachable from other machines and has no admin token (server.insecure = true)"
