"""`ServiceProcess`: what every service has around its work."""

from contextlib import ExitStack, closing
from types import TracebackType

from prometheus_client import CollectorRegistry

from runtime.config.config import ServiceConfig, resolved_json
from runtime.health.health import Health
from runtime.health.server import HealthServer
from runtime.metrics.metric_log import MetricLog
from runtime.process.event_loop import LoopLag
from runtime.process.logging import setup_logging
from runtime.process.shutdown import Shutdown
from runtime.process.watchdog import Watchdog
from runtime.run_dir.run_dir import RunDir, ServiceInfo
from transport.durable import atomic_write


class ServiceProcess:
    """Up from construction until the `with` block ends. Raises `UserError` if a step of the start is refused.

    Order of the start:
        1. stop signals (`shutdown`)
        2. run directory
        3. lock: one process per name and run
        4. log
        5. health endpoint
        6. watchdog
        7. `announce`, `open_metrics`, `write_config`: called by the service, when it is ready for each
    The end takes them back in reverse: what step 7 opened, watchdog, endpoint, lock, signals. The lock file says which
    error left the block.
    """

    def __init__(
        self,
        service: str,
        config: ServiceConfig,
        *,
        rank: int | None = None,
        health_port: int | None = None,
        registry: CollectorRegistry | None = None,
        loop_lag: LoopLag | None = None,
    ) -> None:
        """`rank` is for services with several processes: from rank 1 on it is part of `name`. `health_port` takes the
        place of that in the config. The watchdog watches the event loop of `loop_lag`, too."""
        self.service = service
        self.name = service if not rank else f"{service}-{rank}"
        self.health = Health(service, config.stall_timeout_s)
        self._config = config
        self._registry = registry or CollectorRegistry()
        self._is_announced = False
        with ExitStack() as stack:
            self.shutdown = stack.enter_context(closing(Shutdown()))
            self.run_dir = RunDir(config.run.path).create()
            self._lock = stack.enter_context(self.run_dir.lock(self.name))
            setup_logging(service, config.log, self.run_dir, rank=rank)
            port = config.health.port if health_port is None else health_port
            server = HealthServer(self.health, host=config.health.host, port=port, registry=self._registry)
            stack.enter_context(closing(server))
            self.health_url = server.url
            stacks = self.run_dir.logs / f"{self.name}.stacks"
            stack.enter_context(Watchdog(self.health, stacks, loop_lag, run_dir=self.run_dir))
            self._stack = stack.pop_all()

    def __enter__(self) -> "ServiceProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def announce(self, info: ServiceInfo | None = None) -> None:
        """Publish the addresses of this process; by default its health endpoint alone."""
        self.run_dir.announce(self.name, info or ServiceInfo(health_url=self.health_url))
        if not self._is_announced:
            self._is_announced = True
            self._stack.callback(self.withdraw)

    def withdraw(self) -> None:
        """Take the announcement back; the end of the process does so at the latest. Idempotent."""
        self.run_dir.withdraw(self.name)

    def leave(self) -> None:
        """Withdraw and release the lock, for `Shutdown.loading`: the process ends without leaving the block."""
        if self._is_announced:
            self.withdraw()
        self._lock.release()

    def open_metrics(self) -> MetricLog:
        """The metrics of the service, which are in `/metrics`, too; closed at the end."""
        metrics = MetricLog(self.service, self.run_dir, self._config.metrics, self._registry)
        return self._stack.enter_context(closing(metrics))

    def write_config(self) -> None:
        """Write the resolved config to `config/<service>.json`."""
        atomic_write(self.run_dir.config / f"{self.service}.json", resolved_json(self._config).encode())
