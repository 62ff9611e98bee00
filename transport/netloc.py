"""`netloc`: host and port as a URL or a ZeroMQ endpoint spells them. The one place that knows of IPv6's brackets."""

import socket


def netloc(host: str, port: int | str) -> str:
    """`host:port`; an IPv6 address gets brackets, because its own colons would be taken for the port's."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    """The family of a socket that binds `host`: IPv6 for an IPv6 address, IPv4 for anything else."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
