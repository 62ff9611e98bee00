"""Addresses and which of them other machines can reach: refused without protection, or logged every minute.

Needs no socket library: configs ask at once.
"""

import ipaddress
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from loguru import logger

from transport.errors import SecurityError

REMINDER_S = 60.0
"""Seconds between two reminders that a server is open to other machines."""

_LOCAL_SCHEMES = ("ipc", "inproc")
_WILDCARDS = ("*", "0.0.0.0", "[::]", "::", "")


def is_local(endpoint: str) -> bool:
    """Whether only this machine can reach `endpoint` (`tcp://host:port`, `http://host:port`, `ipc://path`).

    A wildcard, an interface or a name that is not `localhost` counts as reachable from elsewhere.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme in _LOCAL_SCHEMES:
        return True
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(endpoint: str, *, is_protected: bool, advice: str, insecure: bool = False, name: str = "") -> None:
    """Raise `SecurityError` if other machines reach `endpoint`, it has neither keys nor token, and is not `insecure`.

    The message names the endpoint, or what the user calls it (`name`), and ends with `advice`.
    """
    if not (is_protected or insecure or is_local(endpoint)):
        raise SecurityError(f"{name or endpoint} is reachable from other machines{advice}")


def check_bind(endpoint: str, *, has_keys: bool, insecure: bool) -> None:
    """`check_exposure` of a ZeroMQ endpoint, which keys protect."""
    advice = (
        " and has no keys: set keys_dir (`rl keys DIR` makes keys), bind a loopback address, or set insecure = true"
    )
    check_exposure(endpoint, is_protected=has_keys, insecure=insecure, advice=advice)


def missing_keys_reminder(endpoint: str, *, has_keys: bool) -> str | None:
    """The reminder for a ZeroMQ endpoint that other machines reach without keys; `None` for any other."""
    if has_keys or is_local(endpoint):
        return None
    return f"{endpoint} has no keys and is reachable from other machines (insecure = true)"


@contextmanager
def reminding_of_exposure(reminder: str | None) -> Iterator[None]:
    """Log `reminder` at once and then every minute until the block ends; `None`: there is nothing to log.

    From a thread, so that it serves event loops and blocking services alike.
    """
    if reminder is None:
        yield
        return
    over = threading.Event()
    threading.Thread(target=_remind, args=(reminder, over), name="exposure", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _remind(reminder: str, over: threading.Event) -> None:
    while not over.is_set():
        logger.warning(reminder)
        over.wait(REMINDER_S)


def is_wildcard(endpoint: str) -> bool:
    """Whether `endpoint` means every address of this machine."""
    scheme, _, rest = endpoint.partition("://")
    return scheme not in _LOCAL_SCHEMES and rest.rpartition(":")[0] in _WILDCARDS


def reachable(endpoint: str) -> str:
    """`endpoint` as a client on the same machine uses it: a wildcard is reached through loopback."""
    if not is_wildcard(endpoint):
        return endpoint
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    return f"{scheme}://{netloc('::1' if '::' in host else '127.0.0.1', port)}"


def netloc(host: str, port: int | str) -> str:
    """`host:port`; an IPv6 address gets brackets, because its own colons would be taken for the port's."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    """The family of a socket that binds `host`: IPv6 for an IPv6 address, IPv4 for anything else."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
