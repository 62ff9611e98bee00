"""Fake services for tests of `rl`: real processes with the real runtime parts; a config key picks their behaviour.

`python -m tests.runtime.launch.fake_services @ config.json` is a service; with `rl ...` behind it, it is `rl` with
three of them.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Literal

from loguru import logger
from prometheus_client import CollectorRegistry
from pydantic import Field

from runtime import cli
from runtime.config.config import Config, HealthConfig, ServiceConfig, load_config
from runtime.errors import PeerLostError, UserError
from runtime.health.health import Health
from runtime.health.server import HealthServer
from runtime.launch.rl_config import ServiceSpec
from runtime.metrics.metric_log import MetricLog
from runtime.process.logging import setup_logging
from runtime.process.service import run_main
from runtime.process.shutdown import Shutdown
from runtime.run_dir.run_dir import RunDir, ServiceInfo

MODULE = "tests.runtime.launch.fake_services"
SLEEPER = "import time; time.sleep(600)"


class Model(Config):
    """The model."""

    path: str
    """Unused."""


class Server(Config):
    """Where the service would bind."""

    host: str = "127.0.0.1"
    """Address."""
    port: int = 8000
    """Port."""


class FakeServiceConfig(ServiceConfig):
    """A service that only serves."""

    model: Model
    """The model."""
    server: Server = Server()
    """The server."""
    behaviour: Literal[
        "serve", "die", "die_of_peer", "refuse", "exit_zero", "never_ready", "ignore_sigterm", "stray"
    ] = "serve"
    """What it does once it is healthy."""
    delay_s: float = 0.0
    """Seconds before `behaviour` shows."""


class SteppingConfig(FakeServiceConfig):
    """A service that counts steps."""

    max_steps: int = Field(100, gt=0)
    """Steps to make."""
    seed: int = 0
    """Unused."""
    health: HealthConfig = HealthConfig()
    """Health endpoint."""


END_FLAG = "--end-within-s"
SPECS = (
    ServiceSpec("inference", MODULE, FakeServiceConfig),
    ServiceSpec("orchestrator", MODULE, SteppingConfig),
    ServiceSpec("trainer", MODULE, SteppingConfig),
)


def launch(argv: Sequence[str]) -> int:
    """`rl` for these services. `END_FLAG SECONDS` is not a key of its config: it becomes a keyword of `run`."""
    words = list(argv[1:])
    if END_FLAG not in words:
        return cli.run(words, SPECS)
    at = words.index(END_FLAG)
    return cli.run(words[:at] + words[at + 2 :], SPECS, end_timeout_s=float(words[at + 1]))


def serve(argv: Sequence[str]) -> int:
    name = argv[1].rsplit("/", 1)[-1].removesuffix(".json")
    config = load_config(next(spec.config_class for spec in SPECS if spec.name == name), argv, prog=name)
    run_dir = RunDir(config.run.path).create()
    setup_logging(name, config.log, run_dir)
    shutdown = Shutdown()
    health, registry = Health(name, config.stall_timeout_s), CollectorRegistry()
    with run_dir.lock(name):
        server = HealthServer(health, host="127.0.0.1", port=config.health.port, registry=registry)
        metrics = MetricLog(name, run_dir, config.metrics, registry)
        run_dir.announce(name, ServiceInfo(health_url=server.url))
        code = behave(config, health, metrics, shutdown)
        run_dir.withdraw(name)
    logger.info(f"{name} ends")
    return code


def behave(config: FakeServiceConfig, health: Health, metrics: MetricLog, shutdown: Shutdown) -> int:
    if config.behaviour != "never_ready":
        health.ready()
    shutdown.wait(config.delay_s)
    if config.behaviour == "die":
        logger.error("out of memory, or so")
        return 3
    if config.behaviour == "die_of_peer":
        raise PeerLostError("the peer is gone")
    if config.behaviour == "refuse":
        raise UserError("port 8000 is in use")
    if config.behaviour == "exit_zero":
        return 0
    if config.behaviour == "ignore_sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if config.behaviour == "stray":  # a grandchild in a session of its own, as torchrun starts ranks
        subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
    if isinstance(config, SteppingConfig) and config.behaviour == "serve":
        return make_steps(config, health, metrics, shutdown)
    while not shutdown.wait(0.1) or config.behaviour == "ignore_sigterm":
        time.sleep(0.1)
    return 0


def make_steps(config: SteppingConfig, health: Health, metrics: MetricLog, shutdown: Shutdown) -> int:
    health.waiting_for("the next batch")
    for step in range(1, config.max_steps + 1):
        if shutdown.wait(0.01):
            return 0
        metrics.log(step, {"reward/all/mean": step / config.max_steps, "tokens_per_s": 10.0, "staleness/max": 1.0})
        health.progress(step=step)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "rl":
        run_main("rl", launch)
    run_main(sys.argv[2].rsplit("/", 1)[-1].removesuffix(".json"), serve)
