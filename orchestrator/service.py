"""The `orchestrator` process around the `Orchestrator`: run directory, lock, log, health, watchdog, signals.

```
 bind health → load tokenizer and environments → bind batch server → engines healthy → weights live → loops
 SIGTERM: cancel rollouts, finish a batch that has begun, exit 0          second SIGTERM: exit at once
```
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop
from loguru import logger

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
from runtime.errors import UserError
from runtime.metrics.metric_log import MetricLog
from runtime.process.event_loop import LoopLag
from runtime.process.service_process import ServiceProcess
from runtime.run_dir.run_dir import ServiceInfo
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
    loop_lag = LoopLag(advice=LAG_ADVICE)
    with ServiceProcess(SERVICE, config, loop_lag=loop_lag) as process:
        metrics = process.open_metrics()
        process.write_config()
        with process.health.waiting("the environments to load"), process.shutdown.loading(process.leave):
            backend = make_backend(config)
        uvloop.run(_Service(config, process, backend, keys, metrics).run(loop_lag))


@dataclass(frozen=True, slots=True)
class _Service:
    config: OrchestratorConfig
    process: ServiceProcess
    backend: Backend
    keys: CurveKeys | None
    metrics: MetricLog

    async def run(self, loop_lag: LoopLag) -> None:
        stop = self.process.shutdown.event()
        async with asyncio.TaskGroup() as tasks:
            probe = tasks.create_task(loop_lag.probe())
            try:
                await self._run(stop)
            except BindError as error:
                raise UserError(f"{error}; set --server.endpoint") from error
            finally:
                probe.cancel()
                self.process.withdraw()
        logger.info("stopped")

    async def _run(self, stop: asyncio.Event) -> None:
        config, run_dir = self.config, self.process.run_dir
        outbox = open_outbox(run_dir, config.run.name, keep_retired=config.server.record_batches)
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
                run_dir,
                backend.engine,
                backend.adapters,
                server,
                self.process.health,
                self.metrics,
                backend.eval_adapters,
                backend.teachers,
                more_facts=lambda: worker_facts(backend.workers),
            )
            addresses = {"batches": server.endpoint}
            self.process.announce(ServiceInfo(health_url=self.process.health_url, addresses=addresses))
            await orchestrator.run(stop)
