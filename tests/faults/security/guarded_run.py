"""A real orchestrator process with keys, and an honest trainer that knows them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.config import OrchestratorConfig
from tests.orchestrator.core.toys import free_endpoint, make_config, write_config
from tests.support.process import Service, service
from transport.client import BatchClient
from transport.errors import TransportError
from transport.security import CurveKeys, make_keys

SERVICE = "tests.orchestrator.core.toy_service"
DEADLINE_S = 60.0


@dataclass
class HonestTrainer:
    """Trains to the end of the run, but keeps the last step until it is `released`."""

    config: OrchestratorConfig
    released: threading.Event = field(default_factory=threading.Event)
    steps: list[int] = field(default_factory=list)
    error: TransportError | None = None

    def train(self) -> None:
        server = self.config.server
        keys = None if server.keys_dir is None else CurveKeys.for_client(server.keys_dir)
        try:
            with BatchClient(server.endpoint, "toy", keys=keys, lost_timeout_s=DEADLINE_S, heartbeat_s=0.2) as client:
                self._train(client, client.hello())
        except TransportError as error:
            self.error = error

    def _train(self, client: BatchClient, step: int) -> None:
        while (manifest := client.manifest(step)) is not None:
            if step == self.config.max_steps:
                assert self.released.wait(DEADLINE_S)
            client.samples(step, range(manifest.num_samples))
            client.weights_published(step, f"weights/v{step}", f"digest-{step}")
            client.trained(step)
            client.committed(step)
            self.steps.append(step)
            step += 1


@dataclass
class GuardedRun:
    """What a test sees of the run."""

    config: OrchestratorConfig
    trainer: HonestTrainer
    orchestrator: Service

    @property
    def endpoint(self) -> str:
        return self.config.server.endpoint

    def endpoint_from(self, source: str) -> str:
        """The endpoint, as a client uses it that comes from the address `source`."""
        host = self.endpoint.removeprefix("tcp://")
        return f"tcp://{source}:0;{host}"

    def lines_about(self, address: str) -> list[str]:
        """Lines of the orchestrator's log that name `address`."""
        log = self.orchestrator.run_dir.logs / "orchestrator.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if f" from {address}:" in line]


@contextmanager
def guarded_run(folder: Path, *, keys_dir: Path | None, num_steps: int = 30) -> Iterator[GuardedRun]:
    """A run that trains while the block lasts; after it, it must have come to its end in good order."""
    server = {"endpoint": free_endpoint(), "peer_timeout_s": 2.0, "keys_dir": keys_dir and str(keys_dir)}
    config = make_config(folder, max_steps=num_steps, server=server)
    words = (SERVICE, "@", str(write_config(config, folder)))
    with service("orchestrator", config.run.path, *words, TOY_LATENCY_S="0.05") as orchestrator:
        run = GuardedRun(config, HonestTrainer(config), orchestrator)
        thread = threading.Thread(target=run.trainer.train, daemon=True)
        thread.start()
        try:
            orchestrator.until(lambda: run.trainer.steps)
            yield run
        finally:
            run.trainer.released.set()
        thread.join(DEADLINE_S)
        orchestrator.finish()
    assert run.trainer.error is None
    assert run.trainer.steps == list(range(1, num_steps + 1))


def make_keyring(folder: Path) -> Path:
    """A folder with keys for server and client, and one of an intruder that knows the server's public key."""
    make_keys(folder / "keys")
    make_keys(folder / "intruder", ("server", "client"))
    (folder / "intruder" / "server.public").write_bytes((folder / "keys" / "server.public").read_bytes())
    make_keys(folder / "elsewhere")
    for name in ("client.public", "client.secret"):
        (folder / "elsewhere" / name).write_bytes((folder / "keys" / name).read_bytes())
    return folder / "keys"
