"""The run directory: every file that the services of one run share (docs/operations.md)."""

import os
import socket
from pathlib import Path

import msgspec

from runtime.errors import UserError
from runtime.run_dir.service_lock import ServiceLock, is_held
from transport.durable import atomic_write


class ServiceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where to find a live process. Peers and people read it; unknown fields of newer versions are ignored."""

    pid: int = msgspec.field(default_factory=os.getpid)
    host: str = msgspec.field(default_factory=socket.gethostname)
    health_url: str = ""
    """Full URL of `/health`."""
    addresses: dict[str, str] = {}
    """Other addresses by name, for example `{"batches": "tcp://127.0.0.1:29600"}`."""


FOLDERS = (
    "config",
    "logs",
    "metrics",
    "outbox",
    "ledger",
    "rollouts",
    "weights",
    "checkpoints",
    "token_export",
    "report",
    "services",
    "secrets",
    "state",
)


class RunDir:
    """Paths below `runs/<name>`, and who lives there. Constructing it touches nothing; `create` makes the folders."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> "RunDir":
        """Make all folders (idempotent; `secrets` is for the owner only). Raises `UserError` when refused."""
        try:
            for name in FOLDERS:
                (self.path / name).mkdir(parents=True, exist_ok=True)
            self.secrets.chmod(0o700)
        except OSError as error:
            raise UserError(f"cannot create run directory {self.path}: {error.strerror}; set --run.dir") from error
        return self

    @property
    def config(self) -> Path:
        """Resolved configs, one file per service."""
        return self.path / "config"

    @property
    def logs(self) -> Path:
        """`<service>.log`, and `<service>.out` for raw output of services that `rl` started."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """`<service>.jsonl`, and `tensorboard/`."""
        return self.path / "metrics"

    @property
    def outbox(self) -> Path:
        """Batches that are cut and not committed."""
        return self.path / "outbox"

    @property
    def ledger(self) -> Path:
        """Fate of every rollout."""
        return self.path / "ledger"

    @property
    def rollouts(self) -> Path:
        """Saved rollouts."""
        return self.path / "rollouts"

    @property
    def weights(self) -> Path:
        """Published policy versions."""
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        """Durable trainer state."""
        return self.path / "checkpoints"

    @property
    def token_export(self) -> Path:
        """Per-token records."""
        return self.path / "token_export"

    @property
    def report(self) -> Path:
        """Pages for people."""
        return self.path / "report"

    @property
    def services(self) -> Path:
        """Locks and addresses of live services."""
        return self.path / "services"

    @property
    def secrets(self) -> Path:
        """Tokens and keys; only the owner may look."""
        return self.path / "secrets"

    @property
    def state(self) -> Path:
        """Resumable state of the orchestrator."""
        return self.path / "state"

    @property
    def admin_token(self) -> Path:
        """Token for the admin routes of the engines."""
        return self.secrets / "admin.token"

    def lock(self, service: str) -> ServiceLock:
        """Be the only `service` of this run while the lock is held. Raises `UserError` naming the holder."""
        return ServiceLock(self.services / f"{service}.lock")

    def announce(self, service: str, info: ServiceInfo) -> None:
        """Publish the addresses of this process. Call it once they answer."""
        atomic_write(self.services / f"{service}.json", msgspec.json.encode(info))

    def withdraw(self, service: str) -> None:
        """Take the announcement back. Idempotent."""
        (self.services / f"{service}.json").unlink(missing_ok=True)

    def withdraw_leftover(self, service: str) -> None:
        """Take back what a killed `service` announced. The announcement of one that lives stays."""
        if not is_held(self.services / f"{service}.lock"):
            self.withdraw(service)

    def read_services(self) -> dict[str, ServiceInfo]:
        """What services announced, by name. A killed service leaves its file: check that its health URL answers."""
        found = {}
        for path in sorted(self.services.glob("*.json")):
            try:
                found[path.stem] = msgspec.json.decode(path.read_bytes(), type=ServiceInfo)
            except (OSError, msgspec.DecodeError):  # withdrawn while we looked, or written by something else
                continue
        return found
