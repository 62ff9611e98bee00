"""One HTTP exchange with an engine: a body, or an error that says whether another try may help."""

from collections.abc import AsyncIterator, Mapping
from typing import TypeVar

import aiohttp
import msgspec

from orchestrator.engines.protocol import EngineError, InvalidResponse
from orchestrator.engines.retry import TemporaryError, parse_retry_after

MAX_ERROR_CHARS = 500
NOT_IMPLEMENTED = 501
"""The one answer above 500 that will not change."""

_T = TypeVar("_T")


async def exchange(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    timeout_s: float,
    body: bytes | AsyncIterator[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """Body of a 200. `TemporaryError` without an answer and for 429 and 5xx but 501, `EngineError` elsewhere."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.request(method, url, data=body, headers=headers, timeout=timeout) as response:
            payload = await response.read()
    except TimeoutError as error:
        raise TemporaryError(f"{url} did not answer within {timeout_s:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise TemporaryError(f"{url} did not answer: {type(error).__name__}: {error}") from error
    if response.status == 200:
        return payload
    message = f"{url} answered {response.status}: {payload[:MAX_ERROR_CHARS].decode(errors='replace')}"
    if response.status == 429 or (response.status >= 500 and response.status != NOT_IMPLEMENTED):
        retry_after_s = parse_retry_after(response.headers.get("Retry-After"))
        raise TemporaryError(message, retry_after_s, is_busy=response.status == 429)
    raise EngineError(message)


def decoded(decoder: "msgspec.json.Decoder[_T] | msgspec.msgpack.Decoder[_T]", payload: bytes, what: str) -> _T:
    """What `payload` says. Raises `InvalidResponse` that names `what` if it is something else than was agreed."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidResponse(f"{what} does not decode: {error}") from error
