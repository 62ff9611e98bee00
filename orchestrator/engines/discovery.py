"""Engines behind a DNS name: every address that it resolves to is an engine of the pool."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit, urlunsplit

from orchestrator.engines.protocol import EngineError
from transport.security.exposure import netloc

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to IP addresses. Raises `OSError` if the name cannot be resolved."""
RESOLVE_TIMEOUT_S = 10.0


async def resolve_by_dns(host: str, port: int) -> list[str]:
    """All addresses of `host`, as the system's resolver says."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


async def expand(urls: Sequence[str], resolve: Resolve) -> list[str]:
    """`urls` with each name replaced by each of its addresses, without duplicates. Raises `EngineError`."""
    expanded = [one for url in urls for one in await _expand_one(url, resolve)]
    return list(dict.fromkeys(expanded))


async def _expand_one(url: str, resolve: Resolve) -> list[str]:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            addresses = await resolve(host, port)
    except TimeoutError:
        raise EngineError(f"{host} was not resolved within {RESOLVE_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise EngineError(f"{host} cannot be resolved: {error}") from error
    if not addresses:
        raise EngineError(f"{host} has no address")
    return [urlunsplit(parts._replace(netloc=netloc(address, port))).rstrip("/") for address in sorted(addresses)]
