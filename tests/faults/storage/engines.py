"""Real `inference` processes on ports of their own, that a test can kill, freeze and start again."""

import json
import urllib.error
import urllib.request
from pathlib import Path

from runtime.run_dir.run_dir import RunDir
from tests.support.process import Process, free_port


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
