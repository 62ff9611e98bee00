"""Addresses and which of them other machines can reach. Needs no socket library: configs ask at once."""

import ipaddress
import socket

from transport.errors import SecurityError

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


def check_bind(endpoint: str, *, has_keys: bool, insecure: bool) -> None:
    """Raise `SecurityError` for an endpoint that other machines reach, unless there are keys or `insecure` is set."""
    if not (has_keys or insecure or is_local(endpoint)):
        raise SecurityError(
            f"{endpoint} is reachable from other machines and has no keys: set keys_dir (`rl keys DIR` makes keys), "
            "bind a loopback address, or set insecure = true"
        )


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
