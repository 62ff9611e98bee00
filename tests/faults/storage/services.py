"""Warm services of a run on a disk that fails: at most one orchestrator and one trainer at a time.

Real `inference` processes on ports of their own, that a test can kill, freeze and start again.

`Announcements`: a trainer, as far as the policy sees it: it publishes real weights and says so.
"""

import json
import urllib.error
import urllib.request
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from runtime.run_dir.run_dir import RunDir
from tests.faults.exactly_once.fixed_run import FixedRun
from tests.support.process import Process, free_port
from tests.support.waiting import Condition, until
from trainer.ranks import Ranks
from trainer.weights.files import FilePublisher
from transport.changes import Changes
from transport.outbox.progress import PublishedWeights

TIMEOUT_S = 120.0


class Services:
    """What they say is kept below `folder`, over all their lives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, Process] = {}

    def start(self, service: str, arguments: list[str]) -> None:
        """Start `service`; its output goes on from where that of an earlier one ended."""
        self._started[service] = Process(self._folder / f"{service}.out", service, *arguments, warm=True)

    def start_both(self, run: FixedRun) -> None:
        """Orchestrator and trainer of `run`."""
        self.start("orchestrator", run.orchestrator())
        self.start("trainer", run.trainer())

    def exit_code(self, service: str) -> int | None:
        """How it ended; `None` while it lives."""
        return self._started[service].poll()

    def wait(self, service: str) -> int:
        """Its exit code."""
        return self._started[service].wait(TIMEOUT_S)

    def wait_both(self) -> tuple[int, int]:
        """Exit codes of orchestrator and trainer."""
        return self.wait("orchestrator"), self.wait("trainer")

    def output(self, service: str) -> str:
        """All that `service` has printed so far."""
        return self._started[service].output if service in self._started else ""

    def until(self, condition: Condition) -> None:
        """Return once `condition` holds; fail at the deadline, with what the services have said."""
        until(condition, TIMEOUT_S, lambda: "\n".join(self.output(service)[-2000:] for service in self._started))

    def kill(self, service: str) -> None:
        """kill -9, and wait until it is gone."""
        self._started[service].kill()

    def kill_all(self) -> None:
        """Leave none."""
        for service in self._started:
            self.kill(service)


class EngineProcess:
    """One engine of run `run_id`. It lives in a folder of its own and comes back under its address."""

    def __init__(self, folder: Path, model: Path, run_id: str, token_file: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._run_dir = folder / run_id
        self._arguments = ["--model.path", str(model), "--run.dir", str(folder), "--run.name", run_id]
        self._arguments += ["--server.port", str(self.port), "--health.port", "0", "--torch.max-model-len", "128"]
        self._arguments += ["--admin-token-file", str(token_file), "--no-metrics.tensorboard"]
        self.start()

    def start(self) -> None:
        """Start it (again); it is not ready yet."""
        self.process = Process(self._folder / "out", "inference", *self._arguments, warm=True)

    @property
    def versions(self) -> list[int]:
        """Policy versions that it has loaded, in order, over all its lives."""
        words = [line.split("serving version ", 1) for line in self.process.output.splitlines()]
        return [int(found[1].split()[0]) for found in words if len(found) == 2]

    @property
    def is_ready(self) -> bool:
        """Whether it answers requests."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                status: str = json.loads(reply.read())["status"]
                return status == "ok"
        except (OSError, urllib.error.HTTPError):
            return False

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that it has sampled in this life."""
        health_url = RunDir(self._run_dir).read_services()["inference"].addresses["health"]
        with urllib.request.urlopen(health_url, timeout=5) as reply:
            report = json.loads(reply.read())
        return int(report["sampled_tokens"])


class Announcements:
    """What `WeightUpdates` reads of a `BatchServer`. Each version is the model plus a little noise."""

    def __init__(self, root: Path, run_id: str, model_path: Path, keep: int = 2) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.weights: PublishedWeights | None = None
        self._changes = Changes()
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._publisher = FilePublisher(root, run_id, keep, Ranks(0, 1, torch.device("cpu")))

    def publish(self, version: int) -> PublishedWeights:
        """Write `version` to the disk; nobody hears of it. The same version has the same weights every time."""
        with torch.no_grad():
            self._model.model.embed_tokens.weight[0].fill_(1e-3 * version)
        return self._publisher.publish(self._model, version)

    def announce(self, weights: PublishedWeights) -> None:
        """The newest version is this one."""
        self.weights = weights
        self._changes.notify()

    async def wait_weights(self, seen: PublishedWeights | None, timeout_s: float | None = None) -> PublishedWeights:
        """See `BatchServer`."""
        await self._changes.wait_for(lambda: self.weights not in (None, seen))
        assert self.weights is not None
        return self.weights
