"""Who may speak on a link: CURVE keys as files, and the rule that nothing binds beyond loopback without them.

    keys/server.secret  server.public        the orchestrator's pair
    keys/client.secret  client.public        the trainer's pair; any `client*.public` in the folder is on the allow-list

Keys are Z85 text. Secrets have mode 0600 and are refused otherwise. The orchestrator needs `server.secret`,
`server.public` and the clients' public files; a trainer needs its own pair and `server.public`.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from transport.errors import SecurityError

_Z85_KEY_CHARS = 40
_Z85_ALPHABET = frozenset(z85.Z85CHARS)
_SUFFIXES = (".secret", ".public")


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One side's pair and the public keys it accepts: a server's clients, or the one server of a client."""

    public: bytes
    secret: bytes = field(repr=False)
    peers: frozenset[bytes]
    file: Path
    """Where `public` came from, for messages."""

    @classmethod
    def for_server(cls, directory: Path) -> "CurveKeys":
        """The orchestrator's keys; the allow-list is every `client*.public` in `directory`."""
        clients = frozenset(_read_key(path) for path in sorted(directory.glob("client*.public")))
        if not clients:
            raise SecurityError(f"no client*.public in {directory}: no client could connect; make keys with `rl keys`")
        return cls(*_read_pair(directory, "server"), clients, directory / "server.public")

    @classmethod
    def for_client(cls, directory: Path, name: str = "client") -> "CurveKeys":
        """The keys of a trainer or an engine, which accepts only the server of `directory`."""
        server = frozenset({_read_key(directory / "server.public")})
        return cls(*_read_pair(directory, name), server, directory / f"{name}.public")


def make_keys(directory: Path, names: tuple[str, ...] = ("server", "client")) -> list[Path]:
    """Write a new pair for each of `names`; returns the files. `SecurityError`, with none made, if one exists."""
    existing = [path for name in names for suffix in _SUFFIXES if (path := directory / f"{name}{suffix}").exists()]
    if existing:
        raise SecurityError(f"{existing[0]} exists: remove the old keys first, or choose another folder")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    written: list[Path] = []
    for name in names:
        public, secret = zmq.curve_keypair()
        written.append(_write_new(directory / f"{name}.secret", secret, 0o600))
        written.append(_write_new(directory / f"{name}.public", public, 0o644))
    return written


def _write_new(path: Path, key: bytes, mode: int) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key + b"\n")
    return path


def _read_pair(directory: Path, name: str) -> tuple[bytes, bytes]:
    public, secret = _read_key(directory / f"{name}.public"), _read_secret(directory / f"{name}.secret")
    if zmq.curve_public(secret) != public:
        raise SecurityError(f"{name}.public and {name}.secret in {directory} are not a pair")
    return public, secret


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
    if len(key) != _Z85_KEY_CHARS or not set(key) <= _Z85_ALPHABET:
        raise SecurityError(f"{path} does not hold a CURVE key: {_Z85_KEY_CHARS} characters of Z85")
    return key
