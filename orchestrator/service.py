"""The `orchestrator` process around the `Orchestrator`: run directory, lock, log, health, watchdog, signals.

```
 bind health → load tokenizer and environments → bind batch server → engines healthy → weights live → loops
 SIGTERM: cancel rollouts, finish a cut that has begun, exit 0          second SIGTERM: exit at once
```
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import uvloop
from loguru import logger
from prometheus_client import CollectorRegistry

from chat.tokenizer import Tokenizer
from orchestrator.config.envs import EnvConfig
from orchestrator.config.orchestrator import BatchServerConfig, OrchestratorConfig
from orchestrator.engines.factory import make_engine
from orchestrator.engines.protocol import Engine, Model
from orchestrator.envs.loading import load_env
from orchestrator.envs.protocol import EnvAdapter
from orchestrator.envs.workers.env import WorkerEnv, worker_facts
from orchestrator.orchestrator import Orchestrator, open_outbox
from orchestrator.teachers.scored_env import AnyTeacher, load_envs, make_teachers
from runtime.base.files import atomic_write
from runtime.config.config import resolved_json
from runtime.errors import UserError
from runtime.health.health import Health
from runtime.health.server import HealthServer
from runtime.metrics.metric_log import MetricLog
from runtime.process.event_loop import LoopLag
from runtime.process.logging import setup_logging
from runtime.process.shutdown import Shutdown
from runtime.process.watchdog import Watchdog
from runtime.run_dir.run_dir import RunDir, ServiceInfo
from transport.errors import BindError, SecurityError
from transport.security.keys import CurveKeys
from transport.server.server import BatchServer

SERVICE = "orchestrator"
LAG_ADVICE = "an environment that blocks belongs into worker processes (envs[].num_workers)"


@dataclass(frozen=True, slots=True)
class Backend:
    """What generates: the engines, and one adapter per environment in the order of the config."""

    engine: Engine
    adapters: Sequence[EnvAdapter]
    eval_adapters: Sequence[EnvAdapter] = ()
    """One per environment of `eval`."""
    teachers: Sequence[AnyTeacher] = ()
    """Those that the adapters ask."""
    workers: Sequence[WorkerEnv] = ()
    """Those of both that live in worker processes."""


def load_backend(config: OrchestratorConfig) -> Backend:
    """The backend that the config names, not started. Raises `UserError`."""
    tokenizer = Tokenizer.from_folder(config.model.path)
    engine = make_engine(config, tokenizer)
    workers: list[WorkerEnv] = []

    def load(env: EnvConfig, generator: Model) -> EnvAdapter:
        adapter = load_env(env, generator, tokenizer)
        if isinstance(adapter, WorkerEnv):
            workers.append(adapter)
        return adapter

    teachers = make_teachers(config, tokenizer.vocab_size, tokenizer)
    adapters = load_envs(config, engine, teachers, load)
    eval_adapters = [load(env.as_env, engine) for env in config.eval.envs]
    return Backend(engine, adapters, eval_adapters, list(teachers.values()), workers)


def load_keys(config: BatchServerConfig) -> CurveKeys | None:
    """The keys of the batch server, if it has any. Raises `UserError` naming the file that is missing or unsafe."""
    try:
        return None if config.keys_dir is None else CurveKeys.for_server(config.keys_dir)
    except SecurityError as error:
        raise UserError(f"server.keys_dir: {error}") from error


def serve(config: OrchestratorConfig, make_backend: Callable[[OrchestratorConfig], Backend] = load_backend) -> None:
    """Run to the end of the run, or to a stop signal. Raises `ServiceError` for everything that ends it early."""
    keys = load_keys(config.server)
    run_dir = RunDir(config.run.path).create()
    health = Health(SERVICE, config.stall_timeout_s)
    registry = CollectorRegistry()
    loop_lag = LoopLag(advice=LAG_ADVICE)
    with ExitStack() as stack:
        shutdown = stack.enter_context(closing(Shutdown()))
        lock = stack.enter_context(run_dir.lock(SERVICE))
        setup_logging(SERVICE, config.log, run_dir)
        health_server = HealthServer(health, host=config.health.host, port=config.health.port, registry=registry)
        stack.enter_context(closing(health_server))
        stack.enter_context(Watchdog(health, run_dir.logs / f"{SERVICE}.stacks", loop_lag, run_dir=run_dir))
        metrics = stack.enter_context(closing(MetricLog(SERVICE, run_dir, config.metrics, registry)))
        atomic_write(run_dir.config / f"{SERVICE}.json", resolved_json(config).encode())
        with health.waiting("the environments to load"), shutdown.loading(lock.release):
            backend = make_backend(config)
        process = _Process(config, run_dir, backend, keys, health, health_server.url, metrics)
        uvloop.run(process.run(shutdown, loop_lag))


@dataclass(frozen=True, slots=True)
class _Process:
    config: OrchestratorConfig
    run_dir: RunDir
    backend: Backend
    keys: CurveKeys | None
    health: Health
    health_url: str
    metrics: MetricLog

    async def run(self, shutdown: Shutdown, loop_lag: LoopLag) -> None:
        stop = shutdown.event()
        async with asyncio.TaskGroup() as tasks:
            probe = tasks.create_task(loop_lag.probe())
            try:
                await self._run(stop)
            except BindError as error:
                raise UserError(f"{error}; set --server.endpoint") from error
            finally:
                probe.cancel()
                self.run_dir.withdraw(SERVICE)
        logger.info("stopped")

    async def _run(self, stop: asyncio.Event) -> None:
        config = self.config
        outbox = open_outbox(self.run_dir, config.run.name, keep_retired=config.server.record_batches)
        server = BatchServer(
            config.server.endpoint,
            outbox,
            keys=self.keys,
            insecure=config.server.insecure,
            peer_timeout_s=config.server.peer_timeout_s,
        )
        async with server:
            backend = self.backend
            orchestrator = Orchestrator(
                config,
                self.run_dir,
                backend.engine,
                backend.adapters,
                server,
                self.health,
                self.metrics,
                backend.eval_adapters,
                backend.teachers,
                more_facts=lambda: worker_facts(backend.workers),
            )
            addresses = {"batches": server.endpoint}
            self.run_dir.announce(SERVICE, ServiceInfo(health_url=self.health_url, addresses=addresses))
            await orchestrator.run(stop)
