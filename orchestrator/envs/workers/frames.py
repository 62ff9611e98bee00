"""`FrameLink`: messages over one end of a socket pair, in an event loop; `receive_blocking` before there is one."""

import asyncio
import socket
import time
from typing import Generic, TypeVar

import msgspec

from orchestrator.envs.workers.messages import HEAD_BYTES, check_size, decode_frame, encode_frame
from orchestrator.errors import WorkerLinkError

T = TypeVar("T")


class FrameLink(Generic[T]):
    """Reads messages of type `T`. Writing never waits: what is unread is bounded by the rollouts in flight."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: "msgspec.msgpack.Decoder[T]"
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder

    @classmethod
    async def open(cls, end: socket.socket, decoder: "msgspec.msgpack.Decoder[T]") -> "FrameLink[T]":
        """Takes the socket over: it is closed with the link."""
        end.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, decoder)

    def send(self, message: msgspec.Struct) -> None:
        """Lost if the other side is gone. Raises `WorkerLinkError` for a message that is too large."""
        frame = encode_frame(message)
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def receive(self) -> T | None:
        """The next message; `None` when the other side is gone. Raises `WorkerLinkError`."""
        try:
            head = await self._reader.readexactly(HEAD_BYTES)
            body = await self._reader.readexactly(check_size(int.from_bytes(head, "little")))
        except (asyncio.IncompleteReadError, OSError):
            return None
        return decode_frame(self._decoder, body)

    async def hang_up(self) -> None:
        """Close at once: what the other side has not read yet, because it is blocked, is not waited for. Idempotent."""
        self._writer.transport.abort()
        await self.close()

    async def close(self) -> None:
        """Waits until everything is sent. Idempotent."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # the other side was first


def receive_blocking(end: socket.socket, decoder: "msgspec.msgpack.Decoder[T]", timeout_s: float | None = None) -> T:
    """The next message. Raises `WorkerLinkError` when it does not come in time, or not at all."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        head = _read_exactly(end, HEAD_BYTES, deadline)
        body = _read_exactly(end, check_size(int.from_bytes(head, "little")), deadline)
    except TimeoutError:
        raise WorkerLinkError(f"it said nothing for {timeout_s:g} s") from None
    except OSError as error:
        raise WorkerLinkError(f"it hung up: {error}") from error
    return decode_frame(decoder, body)


def _read_exactly(end: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        end.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
        piece = end.recv(min(num_bytes - len(data), 1 << 20))
        if not piece:
            raise WorkerLinkError("it hung up")
        data += piece
    return bytes(data)
