"""A real orchestrator process with keys, and an honest trainer that knows them. The last step waits for the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.orchestrator import OrchestratorConfig
from tests.orchestrator.toys import free_endpoint, make_config, write_config
from tests.support.fakes import FakeTrainer, training
from tests.support.process import Service, service
from transport.security.keys import CurveKeys, make_keys

SERVICE = "tests.orchestrator.toy_service"
DEADLINE_S = 60.0


@dataclass
class GuardedRun:
    """What a test sees of the run."""

    config: OrchestratorConfig
    trainer: FakeTrainer
    orchestrator: Service

    @property
    def endpoint(self) -> str:
        return self.config.server.endpoint

    def endpoint_from(self, source: str) -> str:
        """The endpoint, as a client uses it that comes from the address `source`."""
        host = self.endpoint.removeprefix("tcp://")
        return f"tcp://{source}:0;{host}"

    def lines_about(self, peer: str) -> list[str]:
        """Lines of the orchestrator's log that name `peer`."""
        log = self.orchestrator.run_dir.logs / "orchestrator.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if f" from {peer}:" in line]


@contextmanager
def guarded_run(folder: Path, *, keys_dir: Path | None, num_steps: int = 30) -> Iterator[GuardedRun]:
    """A run that trains while the block lasts; after it, it must have come to its end in good order."""
    server = {"endpoint": free_endpoint(), "peer_timeout_s": 2.0, "keys_dir": keys_dir and str(keys_dir)}
    config = make_config(folder, max_steps=num_steps, server=server)
    words = (SERVICE, "@", str(write_config(config, folder)))
    with service("orchestrator", config.run.path, *words, TOY_LATENCY_S="0.05") as orchestrator:
        keys = None if keys_dir is None else CurveKeys.for_client(keys_dir)
        with training(FakeTrainer(config.server.endpoint, keys=keys, may_train=num_steps - 1)) as trainer:
            orchestrator.until(lambda: trainer.batches)
            try:
                yield GuardedRun(config, trainer, orchestrator)
            finally:
                trainer.may_train = None
        orchestrator.finish()
    assert list(trainer.batches) == list(range(1, num_steps + 1))


def make_keyring(folder: Path) -> Path:
    """A folder with keys for server and client, and one of an intruder that knows the server's public key."""
    make_keys(folder / "keys")
    make_keys(folder / "intruder", ("server", "client"))
    (folder / "intruder" / "server.public").write_bytes((folder / "keys" / "server.public").read_bytes())
    make_keys(folder / "elsewhere")
    for name in ("client.public", "client.secret"):
        (folder / "elsewhere" / name).write_bytes((folder / "keys" / name).read_bytes())
    return folder / "keys"
