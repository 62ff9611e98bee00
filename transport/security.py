"""Who may speak on a link: CURVE keys as files, and the rule that nothing binds beyond loopback without them.

    keys/server.secret  server.public        the orchestrator's pair
    keys/client.secret  client.public        the trainer's pair; any `client*.public` in the folder is on the allow-list

Keys are Z85 text. Secrets have mode 0600 and are refused otherwise. The orchestrator needs `server.secret`,
`server.public` and the clients' public files; a trainer needs its own pair and `server.public`.
"""

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from transport.errors import SecurityError

_Z85_KEY_CHARS = 40


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One side's pair and the public keys it accepts: a server's clients, or the one server of a client."""

    public: bytes
    secret: bytes = field(repr=False)
    peers: frozenset[bytes]

    @classmethod
    def for_server(cls, directory: Path) -> "CurveKeys":
        """The orchestrator's keys; the allow-list is every `client*.public` in `directory`."""
        clients = frozenset(_read_key(path) for path in sorted(directory.glob("client*.public")))
        if not clients:
            raise SecurityError(f"no client*.public in {directory}: nobody could connect; make keys with `rl keys`")
        return cls(_read_key(directory / "server.public"), _read_secret(directory / "server.secret"), clients)

    @classmethod
    def for_client(cls, directory: Path, name: str = "client") -> "CurveKeys":
        """A trainer's keys."""
        server = frozenset({_read_key(directory / "server.public")})
        return cls(_read_key(directory / f"{name}.public"), _read_secret(directory / f"{name}.secret"), server)


def make_keys(directory: Path, names: tuple[str, ...] = ("server", "client")) -> list[Path]:
    """Write a new pair for each of `names`; returns the files. `SecurityError` rather than overwrite one."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    written: list[Path] = []
    for name in names:
        public, secret = zmq.curve_keypair()
        written.append(_write_new(directory / f"{name}.secret", secret, 0o600))
        written.append(_write_new(directory / f"{name}.public", public, 0o644))
    return written


def check_bind(endpoint: str, keys: CurveKeys | None, insecure: bool) -> None:
    """Raise `SecurityError` for an endpoint that other machines reach, unless there are keys or `insecure` is set."""
    if keys is None and not insecure and not is_local(endpoint):
        raise SecurityError(
            f"{endpoint} is reachable from other machines and has no keys: make some with `rl keys DIR`, "
            "bind a loopback address, or set insecure = true"
        )


def is_local(endpoint: str) -> bool:
    """Whether only this machine can reach `endpoint`."""
    scheme, _, rest = endpoint.partition("://")
    if scheme in ("ipc", "inproc"):
        return True
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _write_new(path: Path, key: bytes, mode: int) -> Path:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        raise SecurityError(f"{path} exists: remove the old keys first, or choose another folder") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(key + b"\n")
    return path


def _read_secret(path: Path) -> bytes:
    key = _read_key(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise SecurityError(f"{path} can be read by others (mode {mode:o}): chmod 600 {path}")
    return key


def _read_key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise SecurityError(f"cannot read key file {path}: {error.strerror}; make keys with `rl keys`") from error
    if len(key) != _Z85_KEY_CHARS:
        raise SecurityError(f"{path} does not hold a CURVE key of {_Z85_KEY_CHARS} characters")
    return key
