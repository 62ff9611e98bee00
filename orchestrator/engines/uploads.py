"""`Uploads`: requests as bytes, with few pictures in memory at a time.

Hundreds of rollouts wait for their engine at the same time, and those of a group share the patches of their pictures.
A body kept until the reply comes would be a copy per rollout. So a request with pictures is encoded when its
connection is ready to take it, a few at a time, and the bytes are let go when they are sent.
"""

import asyncio
from collections.abc import AsyncIterator

import msgspec

from transport.wire.generation import GenerateRequest

MAX_UPLOADS = 4
"""Requests with pictures that are sent at the same time."""

_encoder = msgspec.msgpack.Encoder()


class Uploads:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._gate = asyncio.Semaphore(MAX_UPLOADS)

    def body(self, request: GenerateRequest) -> bytes | AsyncIterator[bytes]:
        """The body of one try."""
        return self._stream(request) if request.mm_kwargs else _encoder.encode(request)

    async def _stream(self, request: GenerateRequest) -> AsyncIterator[bytes]:
        async with self._gate:
            yield _encoder.encode(request)
