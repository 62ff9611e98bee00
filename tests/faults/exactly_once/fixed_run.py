"""`FixedRun`: a small run whose final weights depend on its seeds alone, as command lines of the real services.

The orchestrator has the scripted engine and the `copy-text` environment over two letters, so that one guess in four is
right; the trainer has a tiny model on the CPU and a checkpoint every third step.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.process import free_port

CONNECT_TIMEOUT_S = 60.0
"""An orchestrator that is killed over and over is away for long on a busy machine."""
PEER_TIMEOUT_S = 2.0

ORCHESTRATOR = """
batch_size = 16
max_in_flight = 64

[engines]
backend = "scripted"
[engines.scripted]
replies = ["aa", "ab", "ba", "bb"]
latency_s = 0.01
latency_spread = 0.5

[[envs]]
id = "copy-text"
driver = "direct"
group_size = 4
args = { alphabet = "ab", length = 2 }
sampling = { max_tokens = 4 }
"""


@dataclass(frozen=True)
class FixedRun:
    """One run: `name` below `folder`, starting from `model`."""

    folder: Path
    name: str
    model: Path
    max_steps: int = 24
    checkpoint_steps: int = 3
    port: int = field(default_factory=free_port)
    """Where the orchestrator binds. Runs that follow each other may share it."""
    trainer_port: int = 0
    """Where the trainer finds the orchestrator, if not at `port`: a proxy."""
    record_batches: bool = False
    keep: int = 3
    """Checkpoints and publishes that stay."""

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.folder / self.name

    def named(self, name: str) -> "FixedRun":
        """The same run under another name."""
        return replace(self, name=name)

    def below(self, folder: Path) -> "FixedRun":
        """The same run in another folder, and on a port of its own."""
        return replace(self, folder=folder, port=free_port())

    def orchestrator(self) -> list[str]:
        """Arguments of `orchestrator`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "orchestrator.toml"
        config.write_text(ORCHESTRATOR)
        server = ["--server.endpoint", f"tcp://127.0.0.1:{self.port}", "--server.peer-timeout-s", str(PEER_TIMEOUT_S)]
        record = ["--server.record-batches"] if self.record_batches else []
        return ["@", str(config), *self._both(), *server, *record]

    def trainer(self, *flags: str) -> list[str]:
        """Arguments of `trainer`; `flags` come last."""
        link = {
            "endpoint": f"tcp://127.0.0.1:{self.trainer_port or self.port}",
            "connect-timeout-s": CONNECT_TIMEOUT_S,
            "peer-timeout-s": PEER_TIMEOUT_S,
        }
        orchestrator = [word for key, value in link.items() for word in (f"--orchestrator.{key}", str(value))]
        keep = ["--checkpoint.keep", str(self.keep), "--weights.keep", str(self.keep)]
        checkpoint = ["--checkpoint.interval-steps", str(self.checkpoint_steps), *keep]
        return [*self._both(), "--model.seq-len", "256", "--optimizer.lr", "1e-3", *orchestrator, *checkpoint, *flags]

    def _both(self) -> list[str]:
        run = ["--run.dir", str(self.folder), "--run.name", self.name, "--max-steps", str(self.max_steps)]
        return [*run, "--model.path", str(self.model), "--health.port", "0", "--no-metrics.tensorboard"]
