"""A whole run: the orchestrator with its toy backend, a proxy that misbehaves on demand, and the real trainer."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.orchestrator import OrchestratorConfig
from tests.faults.chaos_proxy import ChaosProxy
from tests.orchestrator.toys import make_config, write_config
from tests.support.process import Service, service

RUN = "toy"
FOREVER = 1_000_000


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def toy_config(folder: Path, **changes: Any) -> OrchestratorConfig:
    """A run below `folder` with the peer timeout that users get."""
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(folder, **({"max_steps": FOREVER} | changes))
    values = config.model_dump()
    values["server"].pop("peer_timeout_s")
    return OrchestratorConfig(**values)


@contextmanager
def toy_orchestrator(config: OrchestratorConfig, latency_s: float = 0.02) -> Iterator[Service]:
    """The real orchestrator process with a toy environment and engine."""
    arguments = ("@", str(write_config(config, config.run.dir)))
    module = "tests.orchestrator.toy_service"
    with service("orchestrator", config.run.path, module, *arguments, TOY_LATENCY_S=str(latency_s)) as running:
        yield running


def trainer_flags(config: OrchestratorConfig, model: Path, port: int, *more: str) -> list[str]:
    """Command line of a trainer of this run that reaches the orchestrator at `port`."""
    return [
        *("--model.path", str(model), "--model.seq-len", "64", "--health.port", "0", "--no-metrics.tensorboard"),
        *("--run.dir", str(config.run.dir), "--run.name", RUN, "--checkpoint.interval-steps", "20"),
        *("--orchestrator.endpoint", f"tcp://127.0.0.1:{port}"),
        *more,
    ]


@dataclass(frozen=True)
class LiveRun:
    """Both services and what is between them."""

    orchestrator: Service
    trainer: Service
    proxy: ChaosProxy

    def step(self) -> int:
        """Newest step that the trainer reported."""
        return max(self.steps(), default=0)

    def steps(self) -> list[int]:
        """All steps that the trainer reported, in the order it did."""
        path = self.trainer.run_dir.metrics / "trainer.jsonl"
        if not path.exists():
            return []
        return [int(json.loads(line)["step"]) for line in path.read_text().splitlines() if line.endswith("}")]

    def advance(self, num_steps: int = 3) -> None:
        """Wait until `num_steps` more are trained."""
        target = self.step() + num_steps
        self.trainer.until(lambda: self.step() >= target)


@contextmanager
def live_run(folder: Path, model: Path, **changes: Any) -> Iterator[LiveRun]:
    """A run that trains."""
    config = toy_config(folder, **changes)
    with ExitStack() as stack:
        orchestrator = stack.enter_context(toy_orchestrator(config))
        proxy = stack.enter_context(ChaosProxy(port_of(config.server.endpoint)))
        flags = trainer_flags(config, model, proxy.port)
        trainer = stack.enter_context(service("trainer", config.run.path, "trainer", *flags, warm=True))
        run = LiveRun(orchestrator, trainer, proxy)
        run.advance()
        yield run
